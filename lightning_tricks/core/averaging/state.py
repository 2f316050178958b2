"""Averages in checkpoints: in the state of the callback, or in shards where a checkpoint is a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.lightning.trainer import callbacks_of, saves_folder
from lightning_tricks.core.safe_load.damage import folder_error
from lightning_tricks.core.weights.tensors import float_buffers

KINDS = ("raw", "averaged")


def callback_state(trainer: pl.Trainer, averages: Averages) -> dict[str, Any]:
    """The callback's state in a checkpoint; all ranks take part."""
    state = averages.state_dict()
    if saves_folder(trainer):
        return {name: value for name, value in state.items() if name not in KINDS}
    return {**state, **{kind: averages.weights.unshard(state[kind]) for kind in KINDS}}


def save_shards(trainer: pl.Trainer, averages: Averages, key: str, filepath: str | Path) -> None:
    """Write this rank's shards into the folder that the strategy wrote."""
    if saves_folder(trainer):
        from lightning_tricks.core.averaging.shards import write

        state = averages.state_dict()
        write(
            _folder(trainer, key, filepath),
            averages.weights,
            {kind: state[kind] for kind in KINDS},
            stamp=trainer.global_step,
        )


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
