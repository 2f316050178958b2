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


class Window:
    """The buffers of a module (the statistics of BatchNorm) as they were before the batches of an optimizer step."""

    def __init__(self) -> None:
        self._fresh = True  # whether no batch of the window has been trained on
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []

    def begin_batch(self, module: nn.Module) -> None:
        """Call it before a batch's training step."""
        if self._fresh:
            self._copy(module)

    def end(self, module: pl.LightningModule) -> None:
        """Call it before an optimizer step that is made."""
        self._fresh = True
        if not module.automatic_optimization:
            self._copy(module)  # the next window may begin in the same batch

    def restore(self) -> None:
        """Give the buffers back their values; the window begins anew."""
        copy_(self._buffers, self._copies)

    def _copy(self, module: nn.Module) -> None:
        self._fresh = False
        self._buffers = [buffer.detach() for buffer in module.buffers()]
        self._copies = [buffer.clone() for buffer in self._buffers]


class StepGuard:
    """Catches ``LeaveOutStep``, and takes back what Lightning does for a step that it believes was made.

    The schedules that go by steps wait, ``global_step`` does not move, and the optimizer's own hooks, by which averages
    know of a step, do not run.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._left_out = False  # whether a step of this batch was
        self._counted = 0  # steps left out that are still in global_step

    def start(self, trainer: pl.Trainer) -> None:
        """Guard the optimizer steps of this fit."""
        self.stop()
        self._trainer = trainer
        self._left_out, self._counted = False, 0
        self._undo = [
            wrap_method(trainer.strategy, "optimizer_step", self._step),
            wrap_method(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._schedule),
        ]

    def stop(self) -> None:
        """Leave the Trainer as it was."""
        while self._undo:
            self._undo.pop()()

    def begin_batch(self) -> None:
        """Call it before a batch's training step."""
        self._left_out = False

    def _step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(optimizer, *args, **kwargs)
        except LeaveOutStep:
            self._left_out = True
            self._counted += 1
            scaler = getattr(self._trainer.precision_plugin, "scaler", None)
            if scaler is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
                state = scaler.state_dict()
                scaler.update()  # which it waits for once it has unscaled the gradients
                scaler.load_state_dict(state)
            return None

    def _schedule(self, original: Callable[..., None], interval: str, *args: Any, **kwargs: Any) -> None:
        uncount_steps(self._trainer, self._counted)
        self._counted = 0
        if not (self._left_out and interval == "step"):
            original(interval, *args, **kwargs)
