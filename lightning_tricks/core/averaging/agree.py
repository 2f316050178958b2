"""Averages that are equal on all ranks, of which each has seen other samples, or has weights of its own.

An average over steps is linear in the weights: the mean over the ranks of their averages is the average of the mean of
their weights. So ranks that train apart keep averages of their own weights, and take the mean where somebody sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import lightning as L
import torch
from torch import Tensor

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.weights.tensors import buckets, copy_, float_buffers


@runtime_checkable
class TrainsApart(Protocol):
    """A strategy whose ranks may have weights of their own for some steps, as in local SGD."""

    @property
    def trains_apart(self) -> bool:
        """Whether they may in the present fit."""

    def average_weights(self) -> None:
        """Replace the weights in training by their means over the ranks."""

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors on the device by their means over the ranks, in place."""


def apart(trainer: L.Trainer) -> TrainsApart | None:
    """The strategy, if its ranks may have weights of their own in the present fit."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, TrainsApart) and strategy.trains_apart else None


@torch.no_grad()
def agree_on(trainer: L.Trainer, averages: Averages) -> None:
    """Replace averages by their means over the ranks, if they have changed since; all ranks take part.

    Of ranks that train apart all averages differ, of others those of buffers: BatchNorm sees other samples on each.
    """
    if trainer.world_size == 1 or averages.agreed or averages.holds == "averaged":  # they agreed before they were shown
        return
    strategy, buffers = apart(trainer), float_buffers(averages.module)
    tensors = [average for name, average in averages.tensors.items() if strategy or name in buffers]
    for bucket in buckets(tensors):
        means = [average.to(trainer.strategy.root_device, copy=True) for average in tensors[bucket]]
        if strategy is not None:
            strategy.average(means)
        else:
            means = [trainer.strategy.reduce(mean, reduce_op="mean") for mean in means]
        copy_(tensors[bucket], means)
    averages.agreed = True
