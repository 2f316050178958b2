"""Parameters that do not train, by pattern, and the BatchNorm layers among them."""

from __future__ import annotations

from torch import nn

from lightning_tricks.core.selection import Patterns, batchnorm_stages, check_patterns, select_parameters

__all__ = ["freeze"]


def freeze(model: nn.Module, parameters: Patterns) -> list[str]:
    r"""Freeze parameters: they no longer get gradients.

    BatchNorm layers that lose all their parameters are put into eval mode, so that their running statistics stay.
    Lightning leaves the modes of layers as they are (and says so in a warning when training starts); a
    ``model.train()`` of your own undoes it. Call it before the optimizer is made.

    Args:
        model: The model, or the LightningModule.
        parameters: Regular expressions searched in parameters' names (``""`` is found in every name), or names of
            classes, for the parameters of their instances; one or a sequence.

    Returns:
        The names of the parameters that are frozen now and were not.

    Raises:
        TypeError: For what is no pattern.
        ValueError: If a pattern selects nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> freeze(model, r"^[01]\.")
        ['0.weight', '0.bias', '1.weight', '1.bias']
        >>> model[1].training
        False
    """
    check_patterns("parameters", parameters)
    selected = select_parameters(model, parameters)
    frozen = [name for name, parameter in selected.items() if parameter.requires_grad]
    for parameter in selected.values():
        parameter.requires_grad_(False)
    for layer, _ in batchnorm_stages(model, dict.fromkeys(selected.values(), 0)):
        layer.eval()
    return frozen
