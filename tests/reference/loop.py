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
    window = 1  # the batches of its steps
    depth: float = 3  # Of two tricks in a loop, the one with the smaller number is around the other one.
    inner: Naive | None = None  # The trick inside of this one, whose losses and gradients this one starts from.
    outer: Naive | None = None  # The trick around this one, whose loss is that of both.

    def size(self, epoch: int, accumulate: int) -> int:
        """The batches of an optimizer step."""
        return accumulate

    def factor(self, step: int, total: int) -> float:
        """Of the learning rate."""
        return 1.0

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Before training."""

    def given(self, batch: Batch, number: int) -> Batch:
        """The batch that is trained on."""
        return batch

    def loss(self, module: Any, batch: Batch, number: int) -> Tensor:
        """The mean of the losses."""
        return self.losses(module, batch, number).mean()

    def losses(self, module: Any, batch: Batch, number: int) -> Tensor:
        """The loss of each sample."""
        return self.of(module, batch) if self.inner is None else self.inner.losses(module, batch, number)

    def of(self, module: Any, batch: Batch) -> Tensor:
        """The losses of samples without a trick; of a mask the mean over its pixels."""
        with self.cast():
            return F.cross_entropy(module(batch[0]), batch[1], reduction="none").view(len(batch[0]), -1).mean(1)

    def cast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def descend(self, module: Any, batch: Batch, number: int, share: float) -> None:
        """Add the gradient of a batch."""
        if self.inner is None:
            ((self.outer or self).loss(module, batch, number) * share).backward()
        else:
            self.inner.descend(module, batch, number, share)

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Change the gradients before a step."""

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> int:
        """Instead of a step, where the gradients are not finite; gives the number of steps so far."""
        return step

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        """After a step."""

    def end(self, module: Any) -> None:
        """After training."""


class Both(Naive):
    """Two tricks in one loop: each does its part at its place, and gradients are those of one around the other."""

    def __init__(self, one: Naive, other: Naive) -> None:
        self.forms = sorted((one, other), key=lambda form: form.depth)
        outer, inner = self.forms
        outer.inner, inner.outer = inner, outer

    def size(self, epoch: int, accumulate: int) -> int:
        return max(form.size(epoch, accumulate) for form in self.forms)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "window":
            for form in self.forms:
                form.window = value

    def factor(self, step: int, total: int) -> float:
        return math.prod(form.factor(step, total) for form in self.forms)

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        for form in self.forms:
            form.begin(module, optimizer)

    def given(self, batch: Batch, number: int) -> Batch:
        for form in self.forms:
            batch = form.given(batch, number)
        return batch

    def descend(self, module: Any, batch: Batch, number: int, share: float) -> None:
        self.forms[0].descend(module, batch, number, share)

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for form in self.forms:
            form.clip(module, optimizer, step)

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> int:
        for form in self.forms:
            if (now := form.left_out(module, optimizer, step)) != step:
                return now
        return step

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        for form in reversed(self.forms):
            form.stepped(module, step, ends_epoch)

    def end(self, module: Any) -> None:
        for form in self.forms:
            form.end(module)


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
        size = trick.window = trick.size(epoch, accumulate)
        for first in range(0, len(batches), size):
            optimizer.zero_grad()
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * trick.factor(step, total)
            for batch in batches[first : first + size]:
                trick.descend(module, trick.given(batch, number), number, trick.scale / size)
                number += 1
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            for gradient in gradients:
                gradient /= trick.scale
            step += 1
            if not all(gradient.isfinite().all() for gradient in gradients):
                trick.scale, left_out = trick.scale / 2, left_out + 1
                step = trick.left_out(module, optimizer, step)
                continue
            trick.clip(module, optimizer, step - 1)
            if clip is not None:
                nn.utils.clip_grad_norm_(list(module.parameters()), clip)
            optimizer.step()
            trick.stepped(module, step, first + size >= len(batches))
    trick.end(module)
    return left_out
