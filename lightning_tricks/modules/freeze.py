"""Freezing of parameters and of their BatchNorm layers."""

from __future__ import annotations

from torch import nn

from lightning_tricks.core.selection import Patterns, batchnorm_stages, check_patterns, select_parameters

__all__ = ["freeze"]


def freeze(model: nn.Module, parameters: Patterns) -> list[str]:
    r"""Freeze parameters, so that they get no gradients.

    BatchNorm layers whose parameters are all frozen are put into eval mode, so that their running statistics stay.
    Lightning keeps the modes of layers (and warns of eval mode when training starts), but your own ``model.train()``
    undoes it. Call this before the optimizer is made.

    Args:
        model: The model, or the LightningModule.
        parameters: Regular expressions searched in parameters' names (``""`` is found in every name), or names of
            classes, for the parameters of their instances; one or a sequence.

    Returns:
        The names of the parameters that were frozen by this call.

    Raises:
        TypeError: For a pattern that is not a string.
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
