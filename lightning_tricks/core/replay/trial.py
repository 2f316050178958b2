"""Steps without gradients, and trial steps: they also log nothing and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.rerun import Start, undone
from lightning_tricks.core.replay.undone_fit import ObjectState

T = TypeVar("T")


class WithoutGradients:
    """Runs steps without gradients, until one needs them: it differentiates inside, for forces or a penalty."""

    def __init__(self) -> None:
        self.needs_gradients = False

    def __call__(self, module: L.LightningModule, run: Callable[[bool], T], again: Callable[[], object]) -> T:
        """The result of ``run(False)``, or of ``run(True)`` if that raises an error that gradients avoid.

        Args:
            module: The module, which logs once what both runs log.
            run: A function of whether the step computes gradients.
            again: A function that puts back what the first run has changed.
        """
        logs = LogsOnce()
        if not self.needs_gradients:
            try:
                with logs.of(module):
                    return run(False)
            except RuntimeError as error:
                if "grad" not in str(error):  # as in "does not require grad", "doesn't require gradient"
                    raise
                again()
        with logs.of(module):
            result = run(True)
        self.needs_gradients = True
        return result


class LogsOnce:
    """Leaves out of a second run of a step what the first one has logged before it failed."""

    def __init__(self) -> None:
        self._calls, self._done = 0, 0

    @contextmanager
    def of(self, module: L.LightningModule) -> Iterator[None]:
        """Run the step of a module inside the block, for the first or the second time."""
        self._calls, self._done = 0, self._calls
        undo = wrap_method(module, "log", self._log)
        try:
            yield
        finally:
            undo()

    def _log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._calls += 1
        if self._calls > self._done:
            original(*args, **kwargs)


@contextmanager
def gradients_inside(pl_module: L.LightningModule) -> Iterator[None]:
    """Let ``training_step`` compute gradients inside the block, though its caller and DDP's forward pass have none."""

    def with_gradients(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return original(*args, **kwargs)

    undo = wrap_method(pl_module, "training_step", with_gradients)
    try:
        yield
    finally:
        undo()


@contextmanager
def trial_steps(
    trainer: L.Trainer, pl_module: L.LightningModule, *, deep: bool = False, gradients: bool = False
) -> Iterator[None]:
    """Run steps without gradients inside the block, with the random numbers that the next step will draw.

    Args:
        trainer: The Trainer.
        pl_module: Its module.
        deep: Whether batches are read anew, whose hooks may change the data module, and whose steps may write into
            tensors inside containers, which are copied before, and into weights, which the caller restores.
        gradients: Whether ``training_step`` differentiates inside.
    """
    loggers, start = trainer.loggers, Start.here(pl_module, pl_module.device, deep=deep)
    ddp: Any = trainer.strategy.model
    exchanges = getattr(ddp, "require_forward_param_sync", None)  # DDP stops it after a forward pass without gradients
    kept = [(weight, weight.grad) for weight in pl_module.parameters()] if gradients else []
    with undone(start), _data_untouched(trainer) if deep else nullcontext():
        try:
            for weight, _ in kept:
                weight.grad = None  # a step may call backward()
            wrap_method(pl_module, "log", lambda *_, **__: None)  # an attribute, which is removed with the state
            trainer.loggers = [DummyLogger() for _ in loggers]
            with torch.no_grad(), gradients_inside(pl_module) if gradients else nullcontext():
                yield
            if not deep:
                start.state.refuse_writes()
            start.state.refuse_counts()
        finally:
            trainer.loggers = loggers
            for weight, gradient in kept:
                weight.grad = gradient
            if exchanges is not None:
                ddp.require_forward_param_sync = exchanges


@contextmanager
def _data_untouched(trainer: L.Trainer) -> Iterator[None]:
    """Restore the LightningDataModule at the end of the block."""
    state = ObjectState()
    state.note(getattr(trainer, "datamodule", None), any_class=True, without=[trainer])
    try:
        yield
    finally:
        state.restore()
