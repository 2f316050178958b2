"""Averages in checkpoints: in the state of the callback, or in shards where a checkpoint is a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.lightning.trainer import FolderParts, callbacks_of, saves_folder
from lightning_tricks.core.safe_load.damage import folder_error
from lightning_tricks.core.weights.tensors import float_buffers

KINDS = ("raw", "averaged")


def callback_state(trainer: pl.Trainer, averages: Averages) -> dict[str, Any]:
    """The callback's state in a checkpoint; all ranks take part."""
    state = averages.state_dict()
    if saves_folder(trainer):
        return {name: value for name, value in state.items() if name not in KINDS}
    return {**state, **{kind: averages.weights.unshard(state[kind]) for kind in KINDS}}


@contextmanager
def saving_shards(trainer: pl.Trainer, averages: Mapping[str, Averages], filepath: str | Path) -> Iterator[None]:
    """While the strategy saves a checkpoint, write this rank's shards into its folder; into a file nothing.

    A strategy that has no place for parts gives the folder its name first.
    """
    strategy, write = trainer.strategy, partial(_write_shards, trainer, averages)
    if not saves_folder(trainer):
        yield
    elif isinstance(strategy, FolderParts):
        strategy.parts = (write,)
        try:
            yield
        finally:
            strategy.parts = ()
    else:
        yield
        write(Path(filepath))


def _write_shards(trainer: pl.Trainer, averages: Mapping[str, Averages], folder: Path) -> None:
    from lightning_tricks.core.averaging.shards import write

    for key, running in averages.items():
        state = running.state_dict()
        kinds = {kind: state[kind] for kind in KINDS}
        write(_folder(trainer, key, folder), running.weights, kinds, stamp=trainer.global_step)


def find_state(trainer: pl.Trainer, callback: Callback, checkpoint: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key and the state of a callback in a checkpoint, also with other settings; ``("", {})`` if there is none.

    Raises:
        MisconfigurationException: If several states could belong to the callback.
    """
    states, kind = checkpoint.get("callbacks", {}), type(callback).__name__
    taken = {other.state_key for other in callbacks_of(trainer, type(callback))}
    keys = [key for key in states if isinstance(key, str) and key.split("(")[0] == kind and key not in taken]
    if callback.state_key in states:
        keys = [callback.state_key]
    if len(keys) > 1:
        raise MisconfigurationException(
            f"{callback.state_key} is not in the checkpoint, which has {', '.join(keys)}. Use the settings of one."
        )
    return (keys[0], states[keys[0]]) if keys else ("", {})


def local_state(trainer: pl.Trainer, averages: Averages, key: str, state: Mapping[str, Any], step: int) -> Any:
    """This rank's part of the state, from the callback's state or from the folder of shards.

    Raises:
        MisconfigurationException: If the folder is incomplete or missing.
    """
    weights = averages.weights
    if "raw" in state:
        return {**state, **{kind: weights.shard(state[kind]) for kind in KINDS}}
    folder = _folder(trainer, key, trainer.ckpt_path or "")
    parts = {**weights.trainable(), **float_buffers(averages.module)}
    try:
        from lightning_tricks.core.averaging.shards import read

        return {**state, **read(folder, weights, parts, stamp=step)}
    except (OSError, ValueError, RuntimeError, folder_error()) as error:
        raise MisconfigurationException(
            f"The averages of this checkpoint are in shards in {folder}, which cannot be read: {error}. Resume from the"
            " folder that was saved, from an earlier one, or leave the callback out."
        ) from error


def _folder(trainer: pl.Trainer, key: str, filepath: str | Path) -> Path:
    """The folder of the shards, the same on all ranks."""
    return Path(trainer.strategy.broadcast(filepath)) / "averages" / key
