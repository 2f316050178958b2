"""Quantization after training: linear layers with weights of 8 or 4 bits, for inference."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_tricks.core.adapters.quantization import Precision, check_precision, quantized, rounded_layers
from lightning_tricks.core.selection import Patterns, check_patterns

__all__ = ["quantize"]


def quantize(module: nn.Module, precision: Precision = "int8", *, modules: Patterns | None = None) -> nn.Module:
    r"""Quantize the weights of linear layers, in place: ``w' = scale * round(w / scale)``, for inference and export.

    The scales are those of rows in 8 bits, and those of groups of 32 inputs in 4 bits (of rows, where 32 does not
    divide them); layers with one input keep their weights. Names stay the same, so the file that
    ``torch.save(module.state_dict(), file)`` writes is loaded by plain torch into the class itself, once torchao is
    imported: ``load_state_dict(torch.load(file), assign=True)``. torchao holds a weight of 4 bits in a byte, so int4
    saves no more memory than int8; its other formats pack such weights for the device that runs them. All parameters
    are frozen, and a forward pass in training mode raises: train with ``QAT`` before, or train adapters with
    ``LoRA(base="int8")``.

    Args:
        module: The network, or the LightningModule. It is changed; to keep it, pass a copy.
        precision: "int8" or "int4".
        modules: The linear layers, or modules that hold some, by patterns; all by default. To leave out an output layer
            called "head": ``modules=r"^(?!head)"``.

    Returns:
        The same module.

    Raises:
        ValueError: If there are no such layers, one is quantized already, or its weight is computed from others or has
            64 bits; if the module has adapters.
        ModuleNotFoundError: If torchao is missing, with the extra to install.

    Example:
        >>> network = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        >>> x = torch.randn(4, 64)
        >>> before = network(x)
        >>> bool((quantize(network)(x) - before).abs().max() < 0.05)
        True

    References:
        Jacob et al., arXiv 1712.05877.
    """
    check_precision(precision)
    check_patterns("modules", modules, optional=True)
    layers = rounded_layers(module, modules)
    for layer in layers.values():
        layer.weight = nn.Parameter(quantized(layer.weight.data, precision), requires_grad=False)
        layer.register_forward_pre_hook(_refuse_training)
    module.requires_grad_(False)
    return module


def _refuse_training(layer: nn.Module, inputs: Any) -> None:
    if layer.training and torch.is_grad_enabled():
        raise MisconfigurationException(
            "A network that quantize() has rounded cannot be trained: train it before, with QAT(), or call"
            " module.eval() for inference."
        )
