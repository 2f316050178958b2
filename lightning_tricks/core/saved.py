"""Averages in a checkpoint: in the callback's state, or in shards where the checkpoint is a folder."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from lightning_tricks.core.averages import Averages, Which
from lightning_tricks.core.checks import damage
from lightning_tricks.core.history import History
from lightning_tricks.core.ranks import agree_on_buffers
from lightning_tricks.core.shards import read, write
from lightning_tricks.core.trainer import callbacks_of, is_fitting, monitors, saves_folder, weights_held
from lightning_tricks.core.weights import float_buffers, unnoticed

KINDS = ("raw", "averaged")
RAW = "_raw"  # what ``validate="both"`` appends to the names of the raw weights' metrics
_FORKS = re.compile(r"(_epoch|_step)?(/dataloader_idx_\d+)?$")  # what Lightning appends to the name of a metric


def callback_state(trainer: pl.Trainer, averages: Averages) -> dict[str, Any]:
    """The state that goes into the checkpoint's callbacks; all ranks take part."""
    state = averages.state_dict()
    if saves_folder(trainer):
        return {name: value for name, value in state.items() if name not in KINDS}
    return {**state, **{kind: averages.weights.whole(state[kind]) for kind in KINDS}}


def save_shards(trainer: pl.Trainer, averages: Averages, key: str, filepath: str | Path) -> None:
    """Write this rank's share beside what the strategy wrote to the folder."""
    if saves_folder(trainer):
        state = averages.state_dict()
        write(
            _folder(trainer, key, filepath),
            averages.weights,
            {kind: state[kind] for kind in KINDS},
            stamp=trainer.global_step,
        )


def find_state(trainer: pl.Trainer, callback: Callback, checkpoint: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Key and state that a checkpoint has of a callback, also under the key of other settings; ``("", {})`` if none.

    Raises:
        MisconfigurationException: If it has the states of several that could be this one's.
    """
    states, kind = checkpoint.get("callbacks", {}), type(callback).__name__
    taken = {each.state_key for each in callbacks_of(trainer, type(callback))}
    keys = [key for key in states if key.split("(")[0] == kind and key not in taken]
    if callback.state_key in states:
        keys = [callback.state_key]
    if len(keys) > 1:
        raise MisconfigurationException(
            f"{callback.state_key} is not in the checkpoint, which has {', '.join(keys)}. Give it the settings of one."
        )
    return (keys[0], states[keys[0]]) if keys else ("", {})


def local_state(trainer: pl.Trainer, averages: Averages, key: str, state: Mapping[str, Any], step: int) -> Any:
    """The state as this rank holds it, from the callback's state or from the folder of shards.

    Raises:
        MisconfigurationException: If the folder was not finished, or is gone.
    """
    weights = averages.weights
    if "raw" in state:
        return {**state, **{kind: weights.own(state[kind]) for kind in KINDS}}
    folder = _folder(trainer, key, trainer.ckpt_path or "")
    parts = {**weights.trainable(), **float_buffers(averages.module)}
    try:
        return {**state, **read(folder, weights, parts, stamp=step)}
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise MisconfigurationException(
            f"The averages of this checkpoint are in shards in {folder}, which cannot be read: {error}. Resume from the"
            " folder that was saved, from an earlier one, or leave the callback out."
        ) from error


def _folder(trainer: pl.Trainer, key: str, filepath: str | Path) -> Path:
    """The same for all ranks, as are the strategy's own files."""
    return Path(trainer.strategy.broadcast(filepath)) / "averages" / key


def _require_whole_file(trainer: pl.Trainer) -> None:
    path = trainer.ckpt_path
    if path and os.path.isfile(path) and (wrong := damage(path)):
        raise MisconfigurationException(
            f"{path} is damaged: {wrong}. What torch loads from it is not what was saved: use an earlier checkpoint."
        )


class SavedAverages(Callback, ABC):
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

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        _require_whole_file(trainer)
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
