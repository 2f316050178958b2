"""Averages in checkpoints: in the state of the callback, or in shards where a checkpoint is a folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.trainer import FolderParts, saves_folder
from lightning_tricks.core.safe_load.damage import folder_error
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import float_buffers, identity

KINDS = ("raw", "averaged")
STAMP = "stamp"  # the name of the step among the tensors of a folder


def callback_state(trainer: L.Trainer, averages: Averages) -> dict[str, Any]:
    """The callback's state in a checkpoint; all ranks take part."""
    state = averages.state_dict()
    if saves_folder(trainer):
        return {name: value for name, value in state.items() if name not in KINDS}
    return {**state, **{kind: averages.weights.unshard(state[kind]) for kind in KINDS}}


@contextmanager
def saving_shards(trainer: L.Trainer, averages: Mapping[str, Averages], filepath: str | Path) -> Iterator[None]:
    """While the strategy saves a checkpoint, write this rank's shards into its folder; into a file nothing.

    A strategy that has no place for parts gives the folder its name first.
    """
    strategy, part = trainer.strategy, partial(_shards, trainer, averages)
    if not saves_folder(trainer):
        yield
    elif isinstance(strategy, FolderParts):
        before, strategy.parts = strategy.parts, (*strategy.parts, part)
        try:
            yield
        finally:
            strategy.parts = before
    else:
        import torch.distributed.checkpoint as dcp

        yield
        folder = Path(strategy.broadcast(filepath))
        for name, tensors in part().items():
            dcp.save(tensors, checkpoint_id=folder / name)


def _shards(trainer: L.Trainer, averages: Mapping[str, Averages]) -> dict[str, dict[str, Tensor]]:
    """This rank's shards by kind and name, and the step, by the folder that they are to be in."""
    stamp, shards = torch.tensor(trainer.global_step, device="cpu"), {}
    for key, running in averages.items():
        state, tensors = running.state_dict(), {STAMP: stamp}
        for kind in KINDS:
            parts = running.weights.checkpoint_tensors(state[kind])
            tensors |= {f"{kind}/{name}": part for name, part in parts.items()}
        shards[f"averages/{key}"] = tensors
    return shards


def for_lightning(shown: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning's WeightAveraging has in a checkpoint beside the averaged ``state_dict``.

    Args:
        shown: The ``state_dict``.
        state: A state of averages with raw weights.
    """
    raw = {identity(shown[name]): value for name, value in state["raw"].items() if name in shown}
    return {
        "current_model_state": {name: raw.get(identity(value), value) for name, value in shown.items()},
        "averaging_state": {"n_averaged": torch.tensor(state["updates"], device="cpu")},
    }


def has_raw(trainer: L.Trainer, key: str, state: Mapping[str, Any]) -> bool:
    """Whether a state has the raw weights, since the ``state_dict`` has the averages; all ranks take part."""
    if "raw" in state or not saves_folder(trainer):
        return bool(state.get("raw"))
    return "raw" in _names_in(_folder(trainer, key, trainer.ckpt_path or ""))


def local_state(trainer: L.Trainer, averages: Averages, key: str, state: Mapping[str, Any], step: int) -> Any:
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
        saved = {name for kind in _names_in(folder).values() for name in kind}
        _require_known(trainer, weights, saved, names)
        return {**state, **_read_shards(folder, weights, averages.local_parts(saved & {*names}), stamp=step)}
    except (OSError, ValueError, RuntimeError, folder_error()) as error:
        raise MisconfigurationException(
            f"The averages of this checkpoint are in shards in {folder}, which cannot be read: {error}. Resume from the"
            " folder that was saved, from an earlier one, or leave the callback out."
        ) from error


def _require_known(trainer: L.Trainer, weights: LocalWeights, saved: Collection[str], names: Collection[str]) -> None:
    """Raise if averaged weights have other names in the module, which hooks cannot give them where it is sharded."""
    module, unknown = trainer.lightning_module, sorted(name for name in saved if name not in names)
    if unknown and (module.strict_loading or not weights.trainable().keys() <= set(saved)):
        raise MisconfigurationException(
            f"The checkpoint has averages of weights that {type(module).__name__} does not have: {some(unknown)}. Under"
            f" {type(trainer.strategy).__name__} no hook can rename them: load it into the module that it is of."
        )


def _folder(trainer: L.Trainer, key: str, filepath: str | Path) -> Path:
    """The folder of the shards, the same on all ranks."""
    return Path(trainer.strategy.broadcast(filepath)) / "averages" / key


def _names_in(folder: Path) -> dict[str, set[str]]:
    """The names of the weights in a folder of shards, by kind; a key of DeepSpeed's ends in the rank of the part."""
    from lightning_tricks.core.safe_load.reader import SafeReader  # takes a tenth of a second to import

    kinds: dict[str, set[str]] = {}
    for key in SafeReader(folder).metadata.state_dict_metadata:
        kind, _, name = key.partition("/")
        if name:
            kinds.setdefault(kind, set()).add(re.sub(r"@\d+$", "", name))
    return kinds


def _read_shards(
    folder: Path, weights: LocalWeights, parts: Mapping[str, Tensor], *, stamp: int
) -> dict[str, dict[str, Tensor]]:
    """Read the parts of these names that the folder has, by kind and name.

    DTensors can be read by another number of ranks than wrote them.

    Raises:
        ValueError: If the folder's stamp is not ``stamp``, so that it belongs to another checkpoint.
    """
    from lightning_tricks.core.safe_load.reader import SafeReader, load_safely

    reader = SafeReader(folder)
    found: dict[str, Any] = reader.metadata.state_dict_metadata
    keys = dict(zip(parts, weights.checkpoint_tensors(parts), strict=True))
    kinds: dict[str, dict[str, Tensor]] = {"raw": {}, "averaged": {}}
    tensors = {STAMP: torch.tensor(-1, device="cpu")}
    for kind, values in kinds.items():
        entries = {name: found[f"{kind}/{keys[name]}"] for name in parts if f"{kind}/{keys[name]}" in found}
        values.update({name: torch.empty_like(parts[name], dtype=m.properties.dtype) for name, m in entries.items()})
        tensors.update({f"{kind}/{key}": tensor for key, tensor in weights.checkpoint_tensors(values).items()})
    load_safely(tensors, reader)
    if tensors[STAMP].item() != stamp:
        raise ValueError(f"it is from step {tensors[STAMP].item()}, the checkpoint from step {stamp}")
    return kinds
