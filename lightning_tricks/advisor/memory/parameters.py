"""The parameters of a model, also with adapters: sizes and dtypes, and the sizes of its layers and sharding groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.core.adapters.base import packed_bytes
from lightning_tricks.core.adapters.inject import frozen_linear, injected, select
from lightning_tricks.strategies.fsdp2.blocks import sharding_groups


@dataclass(frozen=True)
class Weight:
    """The shape and dtype of one parameter, and whether it requires gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def bytes(self, dtype: torch.dtype | None = None) -> int:
        """The size in bytes; ``dtype`` replaces a floating-point dtype."""
        return self.numel * (dtype if dtype and self.dtype.is_floating_point else self.dtype).itemsize


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model; tied weights count once.

    Args:
        weights: All parameters.
        buffer_bytes: The size of all buffers in bytes.
        largest_layer: The number of elements of the module with the most parameters of its own.
        largest_group: The number of elements of the largest group that FSDP2 gathers.
        outside_groups: The number of elements outside of these groups, which FSDP2 gathers until the step ends.
    """

    weights: tuple[Weight, ...]
    buffer_bytes: int
    largest_layer: int
    largest_group: int
    outside_groups: int

    def bytes(self, dtype: torch.dtype | None = None, *, trainable: bool = False) -> int:
        """The size in bytes of all parameters, or of the trainable ones."""
        return sum(weight.bytes(dtype) for weight in self.weights if weight.trainable or not trainable)

    def numel(self) -> int:
        """The number of elements of all parameters."""
        return sum(weight.numel for weight in self.weights)


def assumed_blocks(parameters: int) -> int:
    """The blocks of a language model with so many parameters: 32 up to 7 billion, then in proportion to its width.

    >>> assumed_blocks(10**9), assumed_blocks(7 * 10**9), assumed_blocks(70 * 10**9)
    (32, 32, 69)
    """
    return max(32, round(32 * (parameters / 7e9) ** (1 / 3)))


def parameters_of(
    model: nn.Module | int,
    packed: Mapping[int, int] = MappingProxyType({}),
    shapes: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> Parameters:
    """The parameters of a module; a number stands for trainable fp32 weights in ``assumed_blocks`` equal ones.

    Args:
        model: The module, or the number.
        packed: The bytes of the parameters that will be quantized, by ``id``.
        shapes: The shapes of the parameters of which a process has a part, by ``id``.
    """
    if not isinstance(model, nn.Module):
        block = -(-model // assumed_blocks(model))
        return Parameters((Weight((model,), torch.float32, True),), 0, block, block, 0)
    weights = tuple(
        Weight((packed[id(p)],), torch.uint8, False)
        if id(p) in packed
        else Weight(shapes.get(id(p), tuple(p.shape)), p.dtype, p.requires_grad)
        for p in model.parameters()
    )
    layers = [_numel(module.parameters(recurse=False), shapes) for module in model.modules()]
    groups = [_numel(group.parameters(), shapes) for group in sharding_groups(model)]
    return Parameters(
        weights,
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        largest_layer=max(layers),
        largest_group=max(groups, default=0),
        outside_groups=sum(weight.numel for weight in weights) - sum(groups),
    )


def _numel(parameters: Iterable[nn.Parameter], shapes: Mapping[int, tuple[int, ...]]) -> int:
    return sum(math.prod(shapes.get(id(p), p.shape)) for p in parameters)


@contextmanager
def with_adapters(model: nn.Module | int, lora: LoRA | None) -> Iterator[Parameters]:
    """A context in which a module has the adapters of ``lora``, with the parameters that it would have.

    A number of parameters stands for the matrices of ``assumed_blocks`` transformer blocks of 12 d**2 weights each, all
    of them adapted.

    Raises:
        ValueError: If a pattern of ``lora`` selects nothing, or a layer cannot be adapted.
    """
    if lora is None:
        yield parameters_of(model)
    elif not isinstance(model, nn.Module):
        width = (model / (12 * assumed_blocks(model))) ** 0.5
        whole = parameters_of(model)
        adapters = Weight((round(2 * lora.r * model / width),), torch.float32, True)
        frozen = Weight((model,), torch.float32, False)
        if lora.base != "keep":
            frozen = Weight((packed_bytes(model, round(model / width), lora.base),), torch.uint8, False)
        yield Parameters((frozen, adapters), 0, whole.largest_layer, whole.largest_group, whole.outside_groups)
    else:
        layers, trained = select(model, lora.modules, lora.train)
        quantized = frozen_linear(model, trained) if lora.base != "keep" else []
        packed = {
            id(layer.weight): packed_bytes(layer.weight.numel(), layer.out_features, lora.base)
            for _, _, layer in quantized
        }
        with isolate_rng(), injected(model, layers, trained, lora.settings):
            yield parameters_of(model, packed)
