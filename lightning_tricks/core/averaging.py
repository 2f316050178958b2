"""What every callback that averages weights does in a fit: start, steps, validation, exceptions and the end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_tricks.core.averages import Averages, Which
from lightning_tricks.core.history import History
from lightning_tricks.core.ranks import agree_on_buffers, relative_distance
from lightning_tricks.core.saved import RAW, SavedAverages, peers, save
from lightning_tricks.core.step_watch import StepWatch
from lightning_tricks.core.trainer import (
    callbacks_of,
    ends_here,
    is_fitting,
    log_now_and_then,
    validate_once_more,
    weights_held,
)
from lightning_tricks.core.weights import float_buffers
from lightning_tricks.core.wrapping import wrap_method


class AveragingCallback(SavedAverages):
    """Puts averaged weights where they belong; a subclass says when averaging starts and how it goes on."""

    at_end: Which
    buffers: str
    device: str | None
    label: str = ""  # tells several of a kind apart in the names of what they log

    def __init__(self) -> None:
        super().__init__()
        self._watch = StepWatch()
        self._until_left = ExitStack()
        self._start_step = 0.0
        self._finished = False

    @abstractmethod
    def _first_step(self, trainer: pl.Trainer) -> float:
        """The number of optimizer steps after which averaging starts."""

    @abstractmethod
    def _update(self, trainer: pl.Trainer, averages: Averages) -> None:
        """Go on with the averages after an optimizer step."""

    def _begin(self, trainer: pl.Trainer, averages: Averages) -> None:
        """The averages have just become copies of the weights, by the step that reached the start."""

    def _finish(self, trainer: pl.Trainer, averages: Averages) -> None:
        """Training ends with the step just made; the module holds its raw weights."""

    def _metrics(self, averages: Averages) -> dict[str, float]:
        """What is logged besides the distance."""
        return {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        weights = weights_held(trainer, pl_module, type(self).__name__)
        callbacks = peers(trainer)
        if all(each._trainer is not trainer for each in callbacks):
            wrap_method(trainer, "save_checkpoint", partial(save, trainer))
        if self is callbacks[0]:  # before any weights change places
            for each in callbacks:
                each._goes_on = each._owns(trainer)
        if self._averages is not None and self._goes_on:
            self._averages.show("raw")
        else:
            self._averages, self._history = Averages(weights, self.device), History()
        if self.validate == "both":
            loop = trainer.fit_loop.epoch_loop.val_loop
            self._until_left.callback(wrap_method(loop, "run", partial(self._validate_both, trainer)))
        self._trainer, self._fits = trainer, True

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_step, self._finished = self._first_step(trainer), False
        if self._running.tracks:
            self._track(joined=self._running.tensors)  # in the middle of an epoch nobody else joins
        elif trainer.global_step >= self._start_step:
            self._track()
        self._watch.start(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # not in on_train_epoch_start, where a callback after this one (BackboneFinetuning) may still unfreeze
        if batch_idx == 0 and self._running.tracks:
            self._track()
        self._watch.follow(trainer)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        self._running.guard()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._catch_up(trainer)
        if not self._running.tracks:
            return
        if ends_here(trainer):  # before the last validation and the last checkpoint
            self._finish_once(trainer)
        log_now_and_then(trainer, partial(self._logged, trainer))

    def _logged(self, trainer: pl.Trainer) -> dict[str, float]:
        values = {"distance": relative_distance(trainer, self._running), **self._metrics(self._running)}
        suffix = f"/{self.label}" if len(callbacks_of(trainer, type(self))) > 1 else ""
        return {f"tricks/{type(self).__name__.lower()}_{name}{suffix}": value for name, value in values.items()}

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_fitting(trainer):
            agree_on_buffers(trainer, self._running)
            self._show("raw" if self.validate == "raw" else "averaged")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_fitting(trainer):
            return
        self._show("raw")
        if self.validate == "both" and not trainer.sanity_checking:
            self._history.record(trainer.global_step, trainer.callback_metrics, RAW)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch.stop()
        for each in peers(trainer):  # before any weights change places
            each._finish_once(trainer)
        agree_on_buffers(trainer, self._running)
        self._show(self.at_end)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._leave(self.at_end)  # a fit that had nothing left to do had no train end

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._watch.stop()
        if self._fits:
            self._catch_up(trainer)  # the exception may have come before on_train_batch_end
            for each in peers(trainer):
                if each._averages is not None:
                    each._averages.show("raw")
            self._leave("raw")
            self._save_postponed()

    def _validate_both(self, trainer: pl.Trainer, run: Callable[[], Any]) -> Any:
        """The raw weights first, so that everybody finds their metrics when the validation that counts has ended."""
        if not trainer.sanity_checking:
            self._raw_names = validate_once_more(trainer, run, RAW)
        return run()

    def _leave(self, which: Which) -> None:
        self._until_left.close()
        self._fits = False
        self._running.show(which)
        self._running.leave()

    @override
    def _catch_up(self, trainer: pl.Trainer) -> None:
        if not self._watch.stepped():
            return
        self._finished = False
        if self._running.tracks:
            self._update(trainer, self._running)
        elif trainer.global_step >= self._start_step:
            self._track()
            self._begin(trainer, self._running)

    @override
    def _finish_once(self, trainer: pl.Trainer) -> None:
        if self._running.tracks and not self._finished:
            self._finish(trainer, self._running)
            self._finished = True
            self._save_postponed()

    def _track(self, joined: Collection[str] | None = None) -> None:
        buffers = float_buffers(self._running.module) if self.buffers == "average" else {}
        found = {**self._running.weights.trainable(), **buffers}
        self._running.track({name: part for name, part in found.items() if joined is None or name in joined})
