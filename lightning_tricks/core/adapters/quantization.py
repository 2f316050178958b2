"""Weights of linear layers in 8 or 4 bits: which layers, and how torchao rounds them."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from lightning_tricks.core.adapters.base import is_quantized
from lightning_tricks.core.adapters.inject import adapted_layers
from lightning_tricks.core.checks import check_choice, some
from lightning_tricks.core.install import library
from lightning_tricks.core.selection import Patterns, listed, select_modules

Precision = Literal["int8", "int4"]
GROUP = 32  # inputs that share a scale in 4 bits, where it divides them; in 8 bits a row does


def check_precision(precision: str) -> None:
    """Raise for a precision that does not exist."""
    check_choice("precision", precision, get_args(Precision))


def linear_layers(module: nn.Module, modules: Patterns | None, *, lazy: bool = False) -> dict[str, nn.Linear]:
    """The linear layers that are selected or inside selected modules, by name; all of them for None.

    A class with a forward pass of its own is not one, and nor is the output of nn.MultiheadAttention, which reads that
    weight past its layer.

    Args:
        module: The module that holds the layers.
        modules: Patterns of the layers, or of modules that hold some.
        lazy: Whether a lazy layer, whose weight has no sizes yet, may be one of them.

    Raises:
        ValueError: If a pattern selects none, the module has adapters, or the weight of a layer is not a plain one or
            has no sizes yet.

    Example:
        >>> list(linear_layers(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), None))
        ['0', '2']
    """
    if adapters := adapted_layers(module):
        raise ValueError(f"{some(adapters)} have adapters: load merge_adapters(module) into a new module before.")
    linear = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
    }
    if not linear:
        raise ValueError(f"{type(module).__name__} has no nn.Linear layers, and no others are changed: leave this out.")
    chosen: set[nn.Module] = set(linear.values()) if modules is None else set()
    for pattern in () if modules is None else listed(modules):
        found = select_modules(module, pattern)
        layers = {layer for each in found.values() for layer in each.modules()}
        if layers.isdisjoint(linear.values()):
            name, other = next(iter(found.items()))
            raise ValueError(
                f"modules must select nn.Linear layers, {pattern!r} selects {name}, a {type(other).__name__}."
            )
        chosen |= layers
    linear = {name: layer for name, layer in linear.items() if layer in chosen}
    for name, layer in linear.items():
        if "weight" not in dict(layer.named_parameters(recurse=False)):
            raise ValueError(
                f"{name}.weight is computed from others (a parametrization): remove that, or leave the layer out by"
                " modules=."
            )
        if is_lazy(layer.weight) and not lazy:
            raise ValueError(
                f"{name} is a lazy layer, whose weight has no sizes yet: run a batch through the module before, or"
                " leave the layer out by modules=."
            )
        if is_quantized(layer):
            raise ValueError(
                f"{name}.weight must be a plain tensor, got {type(layer.weight.data).__name__}: quantize the trained"
                " weights, once."
            )
    return linear


def rounded_layers(module: nn.Module, modules: Patterns | None, *, lazy: bool = False) -> dict[str, nn.Linear]:
    """The selected linear layers that are rounded: not those with one input, each of whose weights would have a scale.

    Args:
        module: The module that holds the layers.
        modules: Patterns of the layers, or of modules that hold some.
        lazy: Whether a lazy layer may be one of them, which may get one input later.

    Raises:
        ValueError: As ``linear_layers``, or if weights have 64 bits.

    Example:
        >>> list(rounded_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "^1"))
        ['1']
    """
    linear = linear_layers(module, modules, lazy=lazy)
    layers = {name: layer for name, layer in linear.items() if is_lazy(layer.weight) or _inputs(layer) > 1}
    if not layers:
        sizes = some([f"{name} ({_inputs(layer)} -> {layer.out_features})" for name, layer in linear.items()])
        raise ValueError(
            f"{sizes} would not be rounded, since of one input each weight would have a scale of its own: name other"
            " layers, or leave this out."
        )
    for name, layer in layers.items():
        if layer.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name}.weight must have 16 or 32 bits to be rounded, got {layer.weight.dtype}: train with another"
                " precision=, or convert the network by module.float()."
            )
    return layers


def _inputs(layer: nn.Linear) -> int:
    """The number of inputs: only its weight tells that of a loaded lazy layer, and ZeRO-3 leaves a weight no sizes."""
    return layer.weight.shape[1] if layer.weight.ndim == 2 else layer.in_features


def require_torchao() -> Any:
    """Torchao's module for quantization.

    Raises:
        ModuleNotFoundError: If torchao is missing, with the extra to install.
    """
    return library("torchao.quantization", "Quantization", "8bit")


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
