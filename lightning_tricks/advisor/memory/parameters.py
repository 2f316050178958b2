"""What a model is made of: how many numbers, of which type, and how large its pieces are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from lightning_tricks.strategies.fsdp2.blocks import sharding_groups

BLOCKS = 32  # of a plain count nothing else is known: as many as a language model of 7 billion parameters has


@dataclass(frozen=True)
class Weight:
    """One parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def numel(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)

    def bytes(self, dtype: torch.dtype | None = None) -> int:
        """Its bytes, as it is or with ``dtype`` in the place of another floating-point type."""
        return self.numel * (dtype if dtype and self.dtype.is_floating_point else self.dtype).itemsize


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model, each once however often it is used."""

    weights: tuple[Weight, ...]
    buffer_bytes: int
    largest_layer: int  # the numbers of the module with the most parameters of its own
    largest_group: int  # of the largest of the groups that FSDP2 gathers one by one
    outside_groups: int  # of the rest, which it keeps whole for the step

    def bytes(self, dtype: torch.dtype | None = None, *, trained: bool = False) -> int:
        """The bytes of all, or of those that are ``trained``."""
        return sum(weight.bytes(dtype) for weight in self.weights if weight.trained or not trained)

    def numel(self, *, trained: bool = False) -> int:
        """The numbers in all, or in those that are ``trained``."""
        return sum(weight.numel for weight in self.weights if weight.trained or not trained)


def parameters_of(model: nn.Module | int) -> Parameters:
    """The parameters of a module; a plain count is one of fp32 weights, all trained, in equal blocks."""
    if not isinstance(model, nn.Module):
        part = -(-model // BLOCKS)
        return Parameters((Weight((model,), torch.float32, True),), 0, part, part, 0)
    weights = tuple(Weight(tuple(p.shape), p.dtype, p.requires_grad) for p in model.parameters())
    layers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    groups = [sum(p.numel() for p in group.parameters()) for group in sharding_groups(model)]
    everything = sum(weight.numel for weight in weights)
    return Parameters(
        weights,
        sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        max(layers),
        max(groups, default=0),
        everything - sum(groups),
    )
