"""Optimizer steps left out: weights, schedules, ``global_step`` and buffers as if the window had not been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_tricks.core.trainer import uncount_steps
from lightning_tricks.core.weights import copy_
from lightning_tricks.core.wrapping import wrap_method


class LeaveOutStep(Exception):
    """Raised in ``on_before_optimizer_step``: the optimizer is left before it changes anything."""


class StepGuard:
    """Catches ``LeaveOutStep``, and takes back what Lightning does for a step that it believes was made.

    The schedules that go by steps wait, ``global_step`` does not move, and the optimizer's own hooks, by which averages
    know of a step, do not run. Buffers get back the values that they had before the window's first batch.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._left_out = 0  # steps in this batch
        self._counted = 0  # of them, those still in global_step
        self._fresh = True  # whether no batch of the window has been trained on
        self._buffers: tuple[list[Tensor], list[Tensor]] = [], []  # of the module, and copies of them

    def start(self, trainer: pl.Trainer) -> None:
        """Guard the optimizer steps of this fit."""
        self.stop()
        self._trainer = trainer
        self._left_out = self._counted = 0
        self._fresh = True
        self._undo = [
            wrap_method(trainer.strategy, "optimizer_step", self._step),
            wrap_method(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._schedule),
        ]

    def stop(self) -> None:
        """Leave the Trainer as it was."""
        while self._undo:
            self._undo.pop()()

    def begin_batch(self, module: nn.Module) -> None:
        """Call it before a batch's training step."""
        self._left_out = 0
        if self._undo and self._fresh:
            self._copy(module)

    def end_window(self, module: pl.LightningModule) -> None:
        """Call it before an optimizer step that is made."""
        self._fresh = True
        if self._undo and not module.automatic_optimization:
            self._copy(module)  # the next window may begin in the same batch

    def _copy(self, module: nn.Module) -> None:
        self._fresh = False
        buffers = [buffer.detach() for buffer in module.buffers()]
        self._buffers = buffers, [buffer.clone() for buffer in buffers]

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except LeaveOutStep:
            self._left_out += 1
            self._counted += 1
            copy_(*self._buffers)
            return None

    def _schedule(self, original: Callable[..., None], interval: str, *args: Any, **kwargs: Any) -> None:
        uncount_steps(self._trainer, self._counted)
        self._counted = 0
        if not (self._left_out and interval == "step"):
            original(interval, *args, **kwargs)
