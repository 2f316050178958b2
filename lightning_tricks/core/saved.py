"""Averages that can be had: in every checkpoint, in the module for a while, as a state_dict."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn
from typing_extensions import override

from lightning_tricks.core.active import Trick
from lightning_tricks.core.averages import Averages, Which
from lightning_tricks.core.history import History
from lightning_tricks.core.ranks import agree_on_buffers
from lightning_tricks.core.stored import callback_state, find_state, local_state, require_whole_file, save_shards
from lightning_tricks.core.trainer import callbacks_of, is_fitting, monitors, weights_held
from lightning_tricks.core.weights import unnoticed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RAW = "_raw"  # what ``validate="both"`` appends to the names of the raw weights' metrics
_FORKS = re.compile(r"(_epoch|_step)?(/dataloader_idx_\d+)?$")  # what Lightning appends to the name of a metric


class SavedAverages(Trick, ABC):
    """Every checkpoint holds the weights that are validated, and what is needed to go on exactly as if not saved."""

    validate: str
    device: str | None

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._averages: Averages | None = None
        self._history = History()
        self._fits = False  # whether the Trainer is in a fit that this callback was set up for
        self._goes_on = False  # whether that fit goes on with the averages of the one before
        self._foreign = False  # whether a checkpoint is being saved that the averages do not belong to
        self._raw_names: set[str] = set()  # under which the raw weights' metrics are logged
        self._postponed: list[Callable[[], None]] = []

    @abstractmethod
    def _catch_up(self, trainer: pl.Trainer) -> None:
        """Take the optimizer step of this batch, if there was one, into the averages."""

    @abstractmethod
    def _finish_once(self, trainer: pl.Trainer) -> None:
        """Complete the averages when training has ended; the module holds its raw weights."""

    @contextmanager
    def averaged(self, pl_module: nn.Module) -> Iterator[None]:
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
        with ExitStack() as stack:
            for each in peers(self._trainer) if self._trainer is not None else ():
                if each is not self and each._averages is not None and each._averages.module is pl_module:
                    stack.enter_context(each._averages.showing("raw"))  # whose weights may be in the module
            stack.enter_context(self._averages.showing("averaged"))
            yield

    def averaged_state_dict(self) -> dict[str, Any]:
        """A copy of the module's ``state_dict()`` with the averaged weights in it.

        Where the weights are in shards, all ranks take part and each gets all of it, in host memory. Save a model that
        is too large for that with ``trainer.save_checkpoint`` and use ``lightning-tricks export``.

        Raises:
            ValueError: If nothing was trained with this callback yet.
        """
        if self._averages is None:
            raise ValueError(
                f"This {type(self).__name__} has no average: fit a module with it first, and ask"
                " before a checkpoint is loaded into that."
            )
        with self.averaged(self._averages.module):
            return self._averages.weights.state()

    def plot(self, metric: str | None = None, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw a validation metric of the averaged and of the raw weights over the optimizer steps.

        Args:
            metric: Name of the averaged weights' metric; None for the first that was logged.
            ax: Where to draw; None for a new figure.

        Raises:
            ValueError: If there is no such metric; there is one only with ``validate="both"``.
        """
        return self._history.plot(metric, ax)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        require_whole_file(trainer)
        if not is_fitting(trainer):
            self._averages = None  # the module now holds the weights of that checkpoint
            return
        weights = weights_held(trainer, pl_module, type(self).__name__)
        self._averages, self._history = Averages(weights, self.device), History()
        key, state = find_state(trainer, self, checkpoint)
        if state:
            self._history.load_state_dict(state["history"])
            state = local_state(trainer, self._averages, key, state, checkpoint["global_step"])
            self._averages.load_state_dict(state, strict=pl_module.strict_loading)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._foreign or self._averages is None or self._trainer is None:
            return {}
        return {**callback_state(self._trainer, self._averages), "history": self._history.state_dict()}

    def _scored(self, trainer: pl.Trainer, filepath: str | Path) -> Which:
        """The weights that a file's score was measured with."""
        monitor = _FORKS.sub("", monitors(trainer, str(filepath)) or "")
        return "raw" if self.validate == "raw" or monitor in self._raw_names else "averaged"

    def _show(self, which: Which) -> None:
        self._running.show(which)
        self._save_postponed()

    def _save_postponed(self) -> None:
        while self._postponed:
            self._postponed.pop()()

    def _owns(self, trainer: pl.Trainer) -> bool:
        """Whether the averages belong to the Trainer's module and nobody has changed its weights since the fit."""
        averages = self._averages
        if averages is None or trainer is not self._trainer or trainer.lightning_module is not averages.module:
            return False
        return self._fits or averages.untouched()

    @property
    def _running(self) -> Averages:
        assert self._averages is not None, "setup comes first"
        return self._averages


def peers(trainer: pl.Trainer) -> list[SavedAverages]:
    """The Trainer's callbacks with averages, in their order."""
    return [each for each in callbacks_of(trainer, Callback) if isinstance(each, SavedAverages)]


def save(
    trainer: pl.Trainer,
    original: Callable[..., None],
    filepath: str | Path,
    weights_only: bool | None = None,
    storage_options: Any = None,
) -> None:
    """Save a checkpoint while the module holds the weights that are validated, whoever asks for it and when."""
    again = partial(save, trainer, original, filepath, weights_only, storage_options)
    callbacks = peers(trainer)
    for each in callbacks:
        if each._averages is not None and each._averages.busy:
            each._postponed.append(again)  # asked for by a signal handler while weights change places
            return
    for each in callbacks:
        if each._fits:
            each._catch_up(trainer)  # asked for between a step and on_train_batch_end
            agree_on_buffers(trainer, each._running)
    # before any weights change places: for another average they look like weights that somebody has changed
    owners = [each for each in callbacks if each._owns(trainer)]
    with ExitStack() as stack:
        for each in callbacks:
            each._foreign = each not in owners
            stack.callback(setattr, each, "_foreign", False)
        for each in owners:
            stack.enter_context(unnoticed([*each._running.parts(), *each._running.weights.derived()]))
            stack.enter_context(each._running.showing(each._scored(trainer, filepath)))
        original(filepath, weights_only, storage_options)
        for each in owners:
            if not weights_only:
                save_shards(trainer, each._running, each.state_key, filepath)
    for each in callbacks:
        each._save_postponed()
