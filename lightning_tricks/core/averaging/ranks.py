"""Values that all ranks compute together."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
import torch.distributed as dist
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
    copies = averages.weights.copies(list(averages.tensors))
    squares = torch.zeros(2, device=trainer.strategy.root_device)
    for here in buckets(tensors):
        squares = squares + _squares(parts[here], tensors[here], copies[here]).to(squares.device)
    if averages.weights.sharded:
        dist.all_reduce(squares)
    between, size = squares.sqrt().tolist()
    return between / size if size else 0.0


@torch.no_grad()
def _squares(parts: list[Tensor], averages: list[Tensor], copies: list[int]) -> Tensor:
    """This rank's share of the squared norms of ``weights - averages`` and of the weights, of shape (2,)."""
    near = [part.to(average.device, average.dtype) for part, average in zip(parts, averages, strict=True)]
    roots = [math.sqrt(number) for number in copies]
    between = torch._foreach_div(torch._foreach_sub(near, averages), roots)
    return torch.stack([global_norm(between), global_norm(torch._foreach_div(near, roots))]) ** 2
