"""Values that all ranks compute together."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.weights.tensors import buckets, float_buffers, global_norm


def agree_on_buffers(trainer: pl.Trainer, averages: Averages) -> None:
    """Replace the averaged buffers by their mean over the ranks, since BatchNorm sees other samples on every rank."""
    if trainer.world_size == 1 or averages.holds == "averaged":  # they agreed before the averages were shown
        return
    buffers = float_buffers(averages.module)
    for average in [average for name, average in averages.tensors.items() if name in buffers]:
        here = average.to(trainer.strategy.root_device, copy=True)
        average.copy_(trainer.strategy.reduce(here, reduce_op="mean"))


def relative_distance(trainer: pl.Trainer, averages: Averages) -> float:
    """``||weights - averages|| / ||weights||`` over the shards of all ranks; all ranks take part."""
    parts, tensors = averages.parts(), list(averages.tensors.values())
    squares = sum((_squares(parts[bucket], tensors[bucket]) for bucket in buckets(tensors)), torch.zeros(2))
    if averages.weights.sharded:
        squares = trainer.strategy.reduce(squares.to(trainer.strategy.root_device), reduce_op="sum")
    between, size = squares.sqrt().tolist()
    return between / size if size else 0.0


@torch.no_grad()
def _squares(parts: list[Tensor], averages: list[Tensor]) -> Tensor:
    """The squared norms of ``weights - averages`` and of the weights, of shape (2,)."""
    near = [part.to(average.device, average.dtype) for part, average in zip(parts, averages, strict=True)]
    return torch.stack([global_norm(torch._foreach_sub(near, averages)), global_norm(near)]) ** 2
