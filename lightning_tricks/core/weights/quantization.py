"""Weights of linear layers in 8 or 4 bits: which layers, and how torchao rounds them."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_tricks.core.checks import check_choice
from lightning_tricks.core.selection import Patterns, listed, select_modules

Precision = Literal["int8", "int4"]
GROUP = 32  # inputs that share a scale in 4 bits, where it divides them; in 8 bits a row does


def check_precision(precision: str) -> None:
    """Raise for a precision that does not exist."""
    check_choice("precision", precision, get_args(Precision))


def linear_layers(module: nn.Module, modules: Patterns | None) -> dict[str, nn.Linear]:
    """The linear layers that are selected or inside of selected modules, by name; all of them for None.

    A class with a forward pass of its own is not one.

    Raises:
        ValueError: If a pattern selects none.

    Example:
        >>> list(linear_layers(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), None))
        ['0', '2']
    """
    linear = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    }
    if not linear:
        raise ValueError(f"{type(module).__name__} has no nn.Linear layers to quantize.")
    if modules is None:
        return linear
    chosen: set[nn.Module] = set()
    for pattern in listed(modules):
        found = select_modules(module, pattern)
        layers = {layer for each in found.values() for layer in each.modules()}
        if layers.isdisjoint(linear.values()):
            name, other = next(iter(found.items()))
            raise ValueError(
                f"modules must select nn.Linear layers, {pattern!r} selects {name}, a {type(other).__name__}."
            )
        chosen |= layers
    return {name: layer for name, layer in linear.items() if layer in chosen}


def require_torchao() -> Any:
    """Torchao's module for quantization.

    Raises:
        ModuleNotFoundError: If torchao is missing, with the extra to install.
    """
    try:
        import torchao.quantization
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Quantization needs torchao: pip install 'lightning-tricks[8bit]'.") from error
    return torchao.quantization


def quantized(weight: Tensor, precision: Precision) -> Tensor:
    """Torchao's tensor of rounded weights, which a linear layer computes with.

    Args:
        weight: Weights of a linear layer (outputs, inputs).
        precision: "int8", with a scale for a row, or "int4", with one for 32 inputs.

    Example:
        >>> weight = torch.tensor([[-4.0, 0.1, 1.2, 3.0]])
        >>> bool((quantized(weight, "int8").dequantize() - weight).abs().max() <= 4 / 255)
        True
    """
    inputs = weight.shape[1]
    block = (1, GROUP if precision == "int4" and inputs % GROUP == 0 else inputs)
    return require_torchao().IntxUnpackedToInt8Tensor.from_hp(weight, block, getattr(torch, precision))
