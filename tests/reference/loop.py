"""A plain training loop without Lightning, with a naive form of each trick at the place where it belongs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Naive:
    """What the loop asks a trick; here nothing is changed."""

    autocast: torch.dtype | None = None  # of the loop
    scale = 1.0  # of its losses

    def size(self, epoch: int, accumulate: int) -> int:
        """The batches of an optimizer step."""
        return accumulate

    def factor(self, step: int, total: int) -> float:
        """Of the learning rate."""
        return 1.0

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Before training."""

    def loss(self, module: Any, batch: Batch, number: int) -> Tensor:
        return self.of(module, batch)

    def of(self, module: Any, batch: Batch, reduction: str = "mean") -> Tensor:
        with self.cast():
            return F.cross_entropy(module(batch[0]), batch[1], reduction=reduction)

    def cast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def descend(self, module: Any, batch: Batch, number: int, share: float) -> None:
        """Add the gradient of a batch."""
        (self.loss(module, batch, number) * share).backward()

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Change the gradients before a step."""

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Instead of a step, where the gradients are not finite."""

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        """After a step."""

    def end(self, module: Any) -> None:
        """After training."""


def naive_fit(
    module: Any,
    trick: Naive,
    batches: Sequence[Batch],
    *,
    epochs: int = 2,
    accumulate: int = 1,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    scale: float = 1.0,
) -> int:
    """Train ``module`` in place by SGD; gives how many steps were left out.

    ``scale`` is that of the loss, undone before the gradients are looked at. As with a GradScaler a step whose
    gradients overflow is left out and the scale halved; it counts as a step, as with Lightning.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=module.lr, momentum=0.9, weight_decay=1e-3)
    trick.autocast, trick.scale = autocast, scale
    step = number = left_out = 0
    total = sum(math.ceil(len(batches) / trick.size(epoch, accumulate)) for epoch in range(epochs))
    module.train()
    trick.begin(module, optimizer)
    base = [group["lr"] for group in optimizer.param_groups]
    for epoch in range(epochs):
        size = trick.size(epoch, accumulate)
        for first in range(0, len(batches), size):
            optimizer.zero_grad()
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * trick.factor(step, total)
            for batch in batches[first : first + size]:
                trick.descend(module, batch, number, trick.scale / size)
                number += 1
            for parameter in module.parameters():
                parameter.grad /= trick.scale
            step += 1
            if not all(p.grad.isfinite().all() for p in module.parameters()):
                trick.scale, left_out = trick.scale / 2, left_out + 1
                trick.left_out(module, optimizer)
                continue
            trick.clip(module, optimizer, step - 1)
            if clip is not None:
                nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], clip)
            optimizer.step()
            trick.stepped(module, step, first + size >= len(batches))
    trick.end(module)
    return left_out
