"""A fit in which the learning rate rises step by step, and after which everything is as before."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.recorder import StepRecorder
from lightning_tricks.core.replay import random_numbers_of, random_state
from lightning_tricks.core.trainer import callbacks_of, launches_copies
from lightning_tricks.core.wrapping import wrap_method
from lightning_tricks.schedules.lr_restore import Kept, KeptModule
from lightning_tricks.schedules.scheduler import base_lr, set_lr

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
    own = getattr(module, "_orig_mod", module)  # of one compiled as a whole
    _refuse(trainer, own, loaders)
    state = Kept()
    run = Sweep(rates, ends, state, callbacks_of(trainer, GradientAccumulationScheduler))
    with _as_before(trainer, own, [loaders, datamodule], state):
        wrap_method(own, "configure_callbacks", lambda _: [])  # an attribute, so undone with the module's
        trainer.callbacks, trainer.profiler = [run], PassThroughProfiler()  # type: ignore[attr-defined]
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        try:
            trainer.fit(module, loaders, datamodule=datamodule)
        except SystemExit:  # which Lightning makes of Ctrl-C
            if isinstance(run.exception, KeyboardInterrupt):
                raise run.exception from None
            raise
    return run.rates, run.losses


def _refuse(trainer: pl.Trainer, module: Any, loaders: Any) -> None:
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(f"trainer must be a lightning.pytorch Trainer, got {type(trainer).__name__}.")
    if not isinstance(module, pl.LightningModule):
        raise TypeError(f"module must be a LightningModule, got {type(module).__name__}.")
    several = loaders.values() if isinstance(loaders, dict) else loaders
    each_one = several if isinstance(loaders, dict | list | tuple) else [loaders]
    if any(isinstance(each, Iterator) and not hasattr(each, "__dict__") for each in each_one):  # Python's own
        raise TypeError("train_dataloaders must be loaders that can be read again, got an iterator: pass a DataLoader.")
    name, strategy = type(module).__name__, trainer.strategy
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"find_lr steps the optimizer itself, got {name}.automatic_optimization=False, in which training_step does."
        )
    if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
        raise MisconfigurationException(
            f"find_lr needs weights that exist, got lazy layers in {name}: run a batch through it first."
        )
    works = isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy)
    if not works or isinstance(strategy, DeepSpeedStrategy):  # which is a DDPStrategy by inheritance
        raise MisconfigurationException(
            "find_lr works under the single-device and DDP strategies and ModelParallelStrategy (FSDP2), got"
            f" {type(strategy).__name__}: use one of them to find the learning rate."
        )
    if launches_copies(trainer):
        raise MisconfigurationException(
            "find_lr needs a Trainer that fits in this process, got a strategy that starts others (spawn, fork,"
            ' notebook): use strategy="ddp", or one device.'
        )
    if trainer.state.status == TrainerStatus.RUNNING:
        raise MisconfigurationException("find_lr runs a fit of its own: call it before trainer.fit, not inside.")


class Sweep(Callback):
    """The only callback of the sweep: sets the learning rates, records the losses and stops."""

    def __init__(
        self,
        rates: Sequence[float],
        ends: Callable[..., bool],
        state: Kept,
        accumulation: list[GradientAccumulationScheduler],
    ) -> None:
        self._planned, self._ends, self._state, self._accumulation = rates, ends, state, accumulation
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.exception: BaseException | None = None
        self._ratios: list[float] = []  # of the learning rates of the groups to the largest
        self._first = self._taken = self._before = 0  # optimizer steps: when it began, since then, before this epoch
        self._total, self._batches = torch.zeros(()), 0  # of the accumulation window

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # not before: configure_optimizers makes its schedules for the training that will follow
        self._state.note(trainer.optimizers)
        self._ratios = _ratios(trainer.optimizers[0])
        self._first, loop = trainer.global_step, trainer.fit_loop
        loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps = None, -1, None
        loop.epoch_loop.max_steps = self._first + len(self._planned)
        trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
        if self._accumulation:
            trainer.accumulate_grad_batches = self._accumulation[-1].get_accumulate_grad_batches(0)
        for config in trainer.lr_scheduler_configs:
            config.frequency = sys.maxsize  # never stepped, but there for a module that reads it
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
        self.rates.append(rate)
        self.losses.append(loss)
        trainer.should_stop = self._ends(self.rates, self.losses)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._taken == self._before:  # a stream that has run dry
            trainer.should_stop = True
        self._before = self._taken

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.exception = exception


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


@contextmanager
def _as_before(trainer: pl.Trainer, module: pl.LightningModule, data: list[Any], state: Kept) -> Iterator[None]:
    """Put back what a fit changes: the module, the Trainer, the loaders, random numbers, the handler of Ctrl-C."""
    state.note([trainer, data], whatever=True, without=[trainer.strategy.launcher])
    weights, interrupt, device = (
        KeptModule(module, state),
        signal.getsignal(signal.SIGINT),
        trainer.strategy.root_device,
    )
    with ExitStack() as undo:
        if interrupt is not None and threading.current_thread() is threading.main_thread():
            undo.callback(signal.signal, signal.SIGINT, interrupt)
        undo.callback(state.restore)
        undo.callback(weights.restore)
        undo.enter_context(random_numbers_of(random_state(device), device))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        yield
