"""A trial fit with a single callback, after which everything is restored."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_tricks.core.lightning.engine import TORCH, require_engine
from lightning_tricks.core.lightning.fit import NAME, fit_of
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import callbacks_of, launches_processes
from lightning_tricks.core.random_numbers import random_numbers_of, random_state
from lightning_tricks.core.replay.fit_state import ObjectState, TrainedModuleState
from lightning_tricks.core.trick import Trick


def require_undoable(trainer: pl.Trainer, module: Any, loaders: Any, trick: str) -> None:
    """Raise unless a fit with this Trainer, module and loaders can be undone."""
    module = getattr(module, "_orig_mod", module)  # the module inside torch.compile(module)
    require_same_lightning(trainer, trick)
    require_same_lightning(module, trick)
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(f"trainer must be a lightning.pytorch Trainer, got {type(trainer).__name__}.")
    if not isinstance(module, pl.LightningModule):
        raise TypeError(f"module must be a LightningModule, got {type(module).__name__}.")
    several = loaders.values() if isinstance(loaders, dict) else loaders
    given = several if isinstance(loaders, dict | list | tuple) else [loaders]
    # An iterator without attributes is a generator or a list iterator, which can be read once only.
    if any(isinstance(loader, Iterator) and not hasattr(loader, "__dict__") for loader in given):
        raise TypeError("train_dataloaders must be loaders that can be read again, got an iterator: pass a DataLoader.")
    name = type(module).__name__
    if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
        raise MisconfigurationException(
            f"{trick} needs weights that exist, got lazy layers in {name}: run a batch through it first."
        )
    require_engine(trainer, trick, *TORCH)
    if launches_processes(trainer):
        raise MisconfigurationException(
            f"{trick} needs a Trainer that fits in this process, got a strategy that starts others (spawn, fork,"
            ' notebook): use strategy="ddp", or one device.'
        )
    if trainer.state.status == TrainerStatus.RUNNING:
        raise MisconfigurationException(f"{trick} runs a fit of its own: call it before trainer.fit, not inside.")


def is_trial(trainer: pl.Trainer) -> bool:
    """Whether the present fit will be undone."""
    return bool(callbacks_of(trainer, UndoneFit))


class UndoneFit(Callback):
    """The callback of a fit without loggers, validation, checkpoints and schedules, which runs until it stops it.

    Of the Trainer's own callbacks, only those that change the network stay, since it would be another one without them.
    Everything is restored at the end, also after an exception or Ctrl-C.
    """

    def __init__(self) -> None:
        self.exception: BaseException | None = None
        self._kept = ObjectState()

    def fit(
        self, trainer: pl.Trainer, module: Any, loaders: Any, datamodule: Any, beside: Sequence[Callback] = ()
    ) -> None:
        """Fit, and undo the fit.

        Args:
            trainer: The Trainer.
            module: The LightningModule, compiled or not.
            loaders: The training loaders, as for ``trainer.fit``.
            datamodule: The data module, as for ``trainer.fit``.
            beside: Further callbacks, which nobody else uses.
        """
        own = getattr(module, "_orig_mod", module)
        with _as_before(trainer, own, [loaders, datamodule], self._kept):
            # Wrapping sets an attribute, which is removed with the module's state.
            wrap_method(own, "configure_callbacks", lambda _: [])
            kept = [trick for trick in callbacks_of(trainer, Trick) if trick.changes_network]
            trainer.callbacks, trainer.profiler = [*kept, *beside, self], PassThroughProfiler()  # type: ignore[attr-defined]
            trainer.loggers = [DummyLogger() for _ in trainer.loggers]
            try:
                trainer.fit(module, loaders, datamodule=datamodule)
            except SystemExit:  # Lightning raises it after Ctrl-C
                if isinstance(self.exception, KeyboardInterrupt):
                    raise self.exception from None
                raise

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not earlier: configure_optimizers makes its schedules for the training that will follow.
        self._kept.note(trainer.optimizers)
        fit_of(trainer).is_trial = True
        loop = trainer.fit_loop
        loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = None, -1, None, -1
        trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
        for config in trainer.lr_scheduler_configs:
            config.frequency = sys.maxsize  # the scheduler is never stepped, but a module may read it

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.exception = exception


@contextmanager
def _as_before(trainer: pl.Trainer, module: pl.LightningModule, data: list[Any], state: ObjectState) -> Iterator[None]:
    """Restore what a fit changes: module, Trainer, loaders, random numbers, and the handler of Ctrl-C."""
    state.note(
        [trainer, getattr(trainer.fit_loop, NAME, None), data], any_class=True, without=[trainer.strategy.launcher]
    )
    weights, interrupt, device = (
        TrainedModuleState(module, state),
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
        weights.refuse_counts()
