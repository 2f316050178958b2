"""What every callback that averages weights does: validation, checkpoints, resume, exceptions and the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.averages import Averages, Which
from lightning_tricks.core.trainer import StepWatch, is_fitting, require_whole_weights, wrap_method
from lightning_tricks.core.weights import float_buffers, trainable, unnoticed


class AveragingCallback(Callback, ABC):
    """Puts averaged weights where they belong; a subclass says when averaging starts and how it goes on."""

    validate: Which
    at_end: Which
    buffers: str
    device: str | None

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._averages: Averages | None = None
        self._watch = StepWatch()
        self._start_step = 0.0
        self._fits = False  # whether the Trainer is in a fit that this callback was set up for
        self._foreign = False  # whether a checkpoint is being saved that the averages do not belong to

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

    def averaged(self, pl_module: pl.LightningModule) -> AbstractContextManager[None]:
        """Averaged weights in ``pl_module`` inside the ``with`` block; what it held before is always put back.

        Args:
            pl_module: The module that was or is being trained with this callback.

        Raises:
            ValueError: If this callback has no average of that module.
        """
        if self._averages is None or self._averages.module is not pl_module:
            raise ValueError(
                f"This {type(self).__name__} has no average of that {type(pl_module).__name__}: fit it first."
            )
        return self._averages.showing("averaged")

    def averaged_state_dict(self) -> dict[str, Any]:
        """A copy of the module's ``state_dict()`` with the averaged weights in it.

        Raises:
            ValueError: If nothing was trained with this callback yet.
        """
        if self._averages is None:
            raise ValueError(f"This {type(self).__name__} has no average yet: fit a module with it first.")
        with self._averages.showing("averaged"):
            state = self._averages.module.state_dict()
            return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in state.items()}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not is_fitting(trainer):
            return
        require_whole_weights(trainer, type(self).__name__)
        if trainer is not self._trainer:
            wrap_method(trainer, "save_checkpoint", partial(self._save, trainer))
        if self._averages is not None and self._owns(trainer):
            self._averages.show("raw")  # the fit goes on
        else:
            self._averages = Averages(pl_module, self.device)
        self._trainer, self._fits = trainer, True

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not is_fitting(trainer):
            self._averages = None  # the module now holds the weights of that checkpoint
            return
        self._averages = Averages(pl_module, self.device)
        if state := checkpoint["callbacks"].get(self.state_key):
            self._averages.load_state_dict(state, strict=pl_module.strict_loading)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_step = self._first_step(trainer)
        if self._running.tensors or trainer.global_step >= self._start_step:
            self._track(pl_module)
        self._watch.start(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # not in on_train_epoch_start, where a callback after this one (BackboneFinetuning) may still unfreeze
        if batch_idx == 0 and self._running.tensors:
            self._track(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._catch_up(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_fitting(trainer):
            self._running.show(self.validate)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_fitting(trainer):
            self._running.show("raw")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch.stop()
        self._running.show(self.at_end)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._leave(self.at_end)  # a fit that had nothing left to do had no train end

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._watch.stop()
        if self._fits:
            self._catch_up(trainer, pl_module)  # the exception may have come before on_train_batch_end
            self._leave("raw")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._foreign or self._averages is None else self._averages.state_dict()

    def _save(self, trainer: pl.Trainer, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint while the module holds the weights that are validated, whoever asks for it and when."""
        if self._averages is None or not self._owns(trainer):
            self._foreign = True
            try:
                return original(*args, **kwargs)
            finally:
                self._foreign = False
        if self._fits:
            self._catch_up(trainer, trainer.lightning_module)  # asked for between a step and on_train_batch_end
        with unnoticed(self._averages.weights()), self._averages.showing(self.validate):
            return original(*args, **kwargs)

    def _owns(self, trainer: pl.Trainer) -> bool:
        """Whether the averages belong to the Trainer's module and nobody has changed its weights since the fit."""
        averages = self._averages
        if averages is None or trainer is not self._trainer or trainer.lightning_module is not averages.module:
            return False
        return self._fits or averages.untouched()

    def _leave(self, which: Which) -> None:
        self._running.show(which)
        self._running.leave()
        self._fits = False

    def _catch_up(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the optimizer step of this batch, if there was one, into the averages."""
        if not self._watch.stepped():
            return
        if self._running.tensors:
            self._update(trainer, self._running)
        elif trainer.global_step >= self._start_step:
            self._track(pl_module)
            self._begin(trainer, self._running)

    def _track(self, pl_module: pl.LightningModule) -> None:
        buffers = float_buffers(pl_module) if self.buffers == "average" else {}
        self._running.track({**trainable(pl_module), **buffers})

    @property
    def _running(self) -> Averages:
        assert self._averages is not None, "setup comes first"
        return self._averages
