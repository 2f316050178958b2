"""Optimizer steps with losses or gradients that are not finite are skipped, on all ranks together."""

from __future__ import annotations

from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_count, some
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.trainer import grad_scaler, is_fitting, log_every_n_steps, optimizer_number
from lightning_tricks.core.nonfinite.finite import FiniteCheck
from lightning_tricks.core.nonfinite.step_guard import (
    STEPS_LEFT_OUT,
    SkipStep,
    StepGuard,
    Window,
    require_skippable_steps,
    starts_window,
)
from lightning_tricks.core.trick import Trick

__all__ = ["SkipNonFinite"]


@final
class SkipNonFinite(Trick):
    """Skips the optimizer step if any loss or gradient in the accumulation window is NaN or infinite.

    All ranks decide together, by one all-reduced number. All batches of the accumulation window are dropped, without a
    trace in weights (those that a step writes by itself included, in automatic optimization), optimizer state,
    BatchNorm statistics and other buffers, averages (``EMA``) and ``global_step``.
    Schedules that count steps wait, so the run ends as many steps before the end of its schedule as were skipped. The
    loader, random numbers and logged values are not restored, nor is the count of batches for a scheduler with a
    ``frequency``. List this callback before callbacks that read gradients (``AutoClip``), so that they do not see those
    of skipped steps. Of this callback and ``RewindOnSpike``, the first in the list decides.

    With a GradScaler (fp16) the scaler itself skips steps to find its scale. This callback then counts them and
    restores the buffers, which a bad batch would spoil for good; ``global_step`` and schedules go on.

    ``skipped_steps`` is the number so far, logged as ``tricks/skipped_steps``. The cost per optimizer step is one pass
    over the gradients, a copy of the buffers (and of weights that steps write by themselves), and one wait for the
    device.

    Args:
        max_consecutive: Number of consecutive skipped steps after which training stops, at least 1.

    Raises:
        ValueError: If ``max_consecutive`` is below 1.
        TypeError: If ``max_consecutive`` is not an integer.
        MisconfigurationException: Under DeepSpeed, which makes the steps itself, with LBFGS, which steps many times,
            and with PowerSGD, which keeps values that are not finite.
        FloatingPointError: After ``max_consecutive`` skipped steps; names the parameters and the last finite loss.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[SkipNonFinite(max_consecutive=5)], accelerator="cpu", logger=False)
    """

    needs_step_hooks = True
    conflicts = (
        *STEPS_LEFT_OUT,
        Conflict(
            ("TerminateOnNonFinite",),
            "training stops at the first loss or gradient that is not finite, so no step is ever skipped",
            warns=True,
        ),
    )

    def __init__(self, *, max_consecutive: int = 10) -> None:
        check_count("max_consecutive", max_consecutive)
        super().__init__()
        self.max_consecutive = max_consecutive
        self.skipped_steps = 0
        self._in_a_row: dict[int, int] = {}  # consecutive skipped steps, by the optimizer's number
        self._skips = True  # False where a GradScaler skips steps
        self._watch, self._window, self._guard = FiniteCheck(), Window(), StepGuard()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            require_skippable_steps(trainer, "SkipNonFinite")
            self.skipped_steps, self._in_a_row = 0, {}

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._watch, self._window = FiniteCheck(), Window()
        self._window.start(trainer, pl_module, self._undo)
        self._skips = grad_scaler(trainer) is None
        if self._skips:
            self._guard.start(trainer, "SkipNonFinite", self._undo)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._guard.begin_batch()
        self._window.begin_batch(trainer, pl_module, batch_idx)
        if starts_window(trainer, batch_idx):
            self._watch.forget()

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._watch.note(trainer, loss)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not is_fitting(trainer):  # a step that adapts the module to a test set
            return
        number = optimizer_number(trainer, optimizer)
        if self._watch.finite(trainer, [optimizer]):
            self._in_a_row[number] = 0
            self._window.end(pl_module)
            return
        self._in_a_row[number] = in_a_row = self._in_a_row.get(number, 0) + 1
        self.skipped_steps += 1
        if lost := self._window.restore():
            raise MisconfigurationException(
                f"SkipNonFinite leaves out a step that has written into {some(lost)} by itself, for the first time,"
                " which cannot be put back: update such weights in on_train_batch_end, or by their .data."
            )
        trainer.callback_metrics["tricks/skipped_steps"] = torch.tensor(float(self.skipped_steps))
        if in_a_row >= self.max_consecutive:
            raise FloatingPointError(
                f"SkipNonFinite(max_consecutive={self.max_consecutive}) has skipped {in_a_row} optimizer steps"
                f" in a row after step {trainer.global_step}; {self._watch.report(trainer, pl_module)}. Lower the"
                " learning rate, clip gradients, or check the data."
            )
        if self._skips:
            raise SkipStep

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        log_every_n_steps(trainer, lambda: {"tricks/skipped_steps": float(self.skipped_steps)})

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps, "in_a_row": self._in_a_row}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped_steps, self._in_a_row = state_dict["skipped_steps"], state_dict["in_a_row"]
