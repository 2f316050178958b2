"""Parameters that do not train, by pattern, and the BatchNorm layers among them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_tricks.callbacks.stages import batchnorms_of
from lightning_tricks.core.checks import check_strings, compiled, examples


def freeze(model: nn.Module, patterns: str | Sequence[str]) -> list[str]:
    r"""Freeze parameters: those in whose names a pattern is found no longer get gradients.

    BatchNorm layers that lose all their parameters are put into eval mode, so that their running statistics stay.
    Lightning leaves the modes of layers as they are (and says so in a warning when training starts); a
    ``model.train()`` of your own undoes it. Call it before the optimizer is made.

    Args:
        model: The model, or the LightningModule.
        patterns: A regex, or several, searched in each parameter's name; ``""`` is found in every name.

    Returns:
        The names of the parameters that are frozen now and were not.

    Raises:
        ValueError: If a pattern is found in no name.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> freeze(model, r"^[01]\.")
        ['0.weight', '0.bias', '1.weight', '1.bias']
        >>> model[1].training
        False
    """
    check_strings("patterns", patterns)
    parameters, found = dict(model.named_parameters()), set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        regex = compiled("patterns", pattern)
        hits = {name for name in parameters if regex.search(name)}
        if not hits:
            raise ValueError(
                f"patterns: each must be found in a parameter's name, {pattern!r} is in none. {examples(parameters)}"
            )
        found |= hits
    frozen = [name for name, parameter in parameters.items() if name in found and parameter.requires_grad]
    for name in frozen:
        parameters[name].requires_grad_(False)
    for layer, _ in batchnorms_of(model, {parameters[name]: 0 for name in found}):
        layer.eval()
    return frozen
