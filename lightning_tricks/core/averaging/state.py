"""Averages in checkpoints: in the state of the callback, or in shards where a checkpoint is a folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.trainer import FolderParts, saves_folder
from lightning_tricks.core.safe_load.damage import folder_error
from lightning_tricks.core.weights.local import LocalWeights
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
        before, strategy.parts = strategy.parts, (*strategy.parts, write)
        try:
            yield
        finally:
            strategy.parts = before
    else:
        yield
        write(Path(filepath))


def _write_shards(trainer: pl.Trainer, averages: Mapping[str, Averages], folder: Path) -> None:
    from lightning_tricks.core.averaging.shards import write

    for key, running in averages.items():
        state = running.state_dict()
        kinds = {kind: state[kind] for kind in KINDS}
        write(_folder(trainer, key, folder), running.weights, kinds, stamp=trainer.global_step)


def has_raw(trainer: pl.Trainer, key: str, state: Mapping[str, Any]) -> bool:
    """Whether a state has the raw weights, since the ``state_dict`` has the averages; all ranks take part."""
    if "raw" in state or not saves_folder(trainer):
        return bool(state.get("raw"))
    from lightning_tricks.core.averaging.shards import kinds_in

    return "raw" in kinds_in(_folder(trainer, key, trainer.ckpt_path or ""))


def local_state(trainer: pl.Trainer, averages: Averages, key: str, state: Mapping[str, Any], step: int) -> Any:
    """This rank's part of the state, from the callback's state or from the folder of shards.

    Raises:
        MisconfigurationException: If the folder is incomplete or missing, or has other weights than the module.
    """
    weights, names = averages.weights, [*dict(averages.module.named_parameters()), *float_buffers(averages.module)]
    if "raw" in state and not weights.sharded:
        return dict(state)
    if "raw" in state:
        _require_known(trainer, weights, {**state["raw"], **state["averaged"]}, names)
        known = {kind: {name: state[kind][name] for name in state[kind] if name in names} for kind in KINDS}
        return {**state, **{kind: weights.shard(known[kind]) for kind in KINDS}}
    folder = _folder(trainer, key, trainer.ckpt_path or "")
    try:
        from lightning_tricks.core.averaging.shards import kinds_in, read

        saved = {name for kind in kinds_in(folder).values() for name in kind}
        _require_known(trainer, weights, saved, names)
        return {**state, **read(folder, weights, averages.local_parts(saved & {*names}), stamp=step)}
    except (OSError, ValueError, RuntimeError, folder_error()) as error:
        raise MisconfigurationException(
            f"The averages of this checkpoint are in shards in {folder}, which cannot be read: {error}. Resume from the"
            " folder that was saved, from an earlier one, or leave the callback out."
        ) from error


def _require_known(trainer: pl.Trainer, weights: LocalWeights, saved: Collection[str], names: Collection[str]) -> None:
    """Raise if averaged weights have other names in the module, which hooks cannot give them where it is sharded."""
    module, unknown = trainer.lightning_module, sorted(name for name in saved if name not in names)
    if unknown and (module.strict_loading or not weights.trainable().keys() <= set(saved)):
        raise MisconfigurationException(
            f"The checkpoint has averages of weights that {type(module).__name__} does not have: {some(unknown)}. Under"
            f" {type(trainer.strategy).__name__} no hook can rename them: load it into the module that it is of."
        )


def _folder(trainer: pl.Trainer, key: str, filepath: str | Path) -> Path:
    """The folder of the shards, the same on all ranks."""
    return Path(trainer.strategy.broadcast(filepath)) / "averages" / key
