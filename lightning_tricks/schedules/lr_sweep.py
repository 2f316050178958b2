"""A fit in which the learning rate rises step by step, and after which everything is as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.progress import progress
from lightning_tricks.core.recorder import StepRecorder
from lightning_tricks.core.trainer import callbacks_of
from lightning_tricks.schedules.scheduler import base_lr, set_lr
from lightning_tricks.schedules.undone_fit import UndoneFit, require_undoable

Curve = tuple[list[float], list[float]]  # learning rates and losses


def sweep(
    trainer: pl.Trainer, module: Any, loaders: Any, datamodule: Any, rates: Sequence[float], ends: Callable[..., bool]
) -> Curve:
    """Fit with one learning rate a step, and undo it.

    Args:
        trainer: The Trainer.
        module: The LightningModule, compiled or not.
        loaders: As for ``trainer.fit``.
        datamodule: As for ``trainer.fit``.
        rates: Of the parameter group with the largest base learning rate, in each optimizer step.
        ends: Function of the learning rates and losses so far: whether to stop.

    Returns:
        The learning rates of the steps taken, and their losses, all finite.
    """
    require_undoable(trainer, module, loaders, "find_lr")
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"find_lr steps the optimizer itself, got {type(module).__name__}.automatic_optimization=False, in which"
            " training_step does."
        )
    with progress(None, "find_lr", len(rates)) as bar:
        run = Sweep(rates, ends, callbacks_of(trainer, GradientAccumulationScheduler), bar)
        run.fit(trainer, module, loaders, datamodule)
    return run.rates, run.losses


class Sweep(UndoneFit):
    """Sets the learning rates, records the losses and stops."""

    def __init__(
        self,
        rates: Sequence[float],
        ends: Callable[..., bool],
        accumulation: list[GradientAccumulationScheduler],
        bar: Any,
    ) -> None:
        super().__init__()
        self._planned, self._ends, self._accumulation, self._bar = rates, ends, accumulation, bar
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._ratios: list[float] = []  # of the learning rates of the groups to the largest
        self._first = self._taken = self._before = 0  # optimizer steps: when it began, since then, before this epoch
        self._total, self._batches = torch.zeros(()), 0  # of the accumulation window

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._ratios = _ratios(trainer.optimizers[0])
        self._first = trainer.global_step
        trainer.fit_loop.epoch_loop.max_steps = self._first + len(self._planned)
        if self._accumulation:
            trainer.accumulate_grad_batches = self._accumulation[-1].get_accumulate_grad_batches(0)
        if hasattr(pl_module, "_sam_recorder"):
            vars(pl_module)["_sam_recorder"] = StepRecorder()  # which records nothing: SAM takes the plain gradient

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._set(trainer.optimizers[0])

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._set(optimizer)  # again, after a warm-up in the module's own optimizer_step

    def _set(self, optimizer: Optimizer) -> None:
        for group, ratio in zip(optimizer.param_groups, self._ratios, strict=False):
            set_lr(group, ratio * self._planned[min(self._taken, len(self._planned) - 1)])

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs:  # nothing if training_step returned None
            self._total = self._total.to(outputs["loss"].device) + outputs["loss"].detach()
            self._batches += 1
        if trainer.global_step == self._first + self._taken:
            return  # in an accumulation window, by whose length Lightning has divided the loss
        total = self._total.float() * trainer.accumulate_grad_batches
        window = torch.stack([total, torch.tensor(float(self._batches), device=total.device)])
        total, batches = trainer.strategy.reduce(window.to(trainer.strategy.root_device), reduce_op="sum").tolist()
        loss, rate = total / batches if batches else None, self._planned[min(self._taken, len(self._planned) - 1)]
        self._taken, self._total, self._batches = trainer.global_step - self._first, torch.zeros(()), 0
        if loss is None:
            return
        if not abs(loss) < float("inf"):
            trainer.should_stop = True
            return
        self._bar.update()
        self.rates.append(rate)
        self.losses.append(loss)
        trainer.should_stop = self._ends(self.rates, self.losses)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._taken == self._before:  # a stream that has run dry
            trainer.should_stop = True
        self._before = self._taken


def _ratios(optimizer: Optimizer) -> list[float]:
    """The base learning rates of the groups, which schedules multiply, by the largest of them."""
    given = [group.get("lr") for group in optimizer.param_groups]
    numbers = all(isinstance(rate, int | float | Tensor) for rate in given)
    rates = [float(base_lr(dict(group))) for group in optimizer.param_groups] if numbers else []
    if max(rates, default=0.0) <= 0:
        raise MisconfigurationException(
            "find_lr needs an optimizer from configure_optimizers whose parameter groups have a learning rate, above 0"
            f" in one of them, got {rates or given} in {type(optimizer).__name__}: set lr."
        )
    return [rate / max(rates) for rate in rates]
