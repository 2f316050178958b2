"""Whole weights from sharded checkpoints: the folders that Lightning saves under FSDP and DeepSpeed.

No process group and no GPU is needed, and nothing in the folders is run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from lightning_tricks.checkpoints.stream import StoredTensor
from lightning_tricks.checkpoints.zero_folder import zero_weights
from lightning_tricks.core.safe_load.damage import unfinished
from lightning_tricks.core.safe_load.reader import SafeReader, load_safely

PREFIXES = ("state_dict", "model")  # Lightning's ModelParallelStrategy (FSDP2), its FSDPStrategy


def stored_weights(folder: Path) -> dict[str, Any]:
    """The state_dict of a sharded checkpoint, its tensors not read yet.

    Under DeepSpeed it has the fp32 masters.

    Raises:
        ValueError: If the folder is no checkpoint, was not finished, or is damaged.
        ImportError: For a DeepSpeed checkpoint, if deepspeed is missing.
    """
    if wrong := unfinished(folder):
        raise ValueError(f"{folder} is a folder, but no checkpoint: {wrong}.")
    state = _or_damaged(folder, partial(zero_weights if (folder / "latest").is_file() else _from_shards, folder))
    if not state:
        raise ValueError(f"{folder} holds no weights under the names that Lightning gives them.")
    guarded = {  # one for all names of a tied weight
        value: replace(value, read=partial(_or_damaged, folder, value.read))
        for value in state.values()
        if isinstance(value, StoredTensor)
    }
    return {name: guarded[value] if isinstance(value, StoredTensor) else value for name, value in state.items()}


def averages_beside(folder: Path) -> dict[str, bool]:
    """The callbacks with averages in shards of their own, and whether the state_dict holds these averages.

    It does if the shards have the raw weights.

    Raises:
        ValueError: If the shards are damaged.
    """
    found = {}
    for shards in sorted(file.parent for file in folder.glob("averages/*/.metadata")):
        try:
            names = SafeReader(shards).metadata.state_dict_metadata
        except ValueError as error:
            raise ValueError(f"{shards} is damaged or hostile: {error}") from error
        found[shards.name] = any(name.startswith("raw/") for name in names)
    return found


def _or_damaged(folder: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ImportError:
        raise
    except (Exception, CheckpointException) as error:  # a damaged file raises almost anything
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = str(first) if isinstance(first, ValueError) else type(first).__name__
        raise ValueError(f"{folder} is damaged or not a checkpoint: {' '.join(reason.split())}.") from error


def _from_shards(folder: Path) -> dict[str, Any]:
    reader = SafeReader(folder)
    _require_all_bytes(folder, reader.metadata)
    state: dict[str, Any] = {}
    small: dict[str, Any] = {}
    paths = {key: path for key, path in (reader.metadata.planner_data or {}).items() if path[0] in PREFIXES}
    for key, path in paths.items():
        entry = reader.metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata) and len(path) == 2:
            read = partial(_read_tensor, reader, key, entry)
            state[path[1]] = StoredTensor(entry.size, entry.properties.dtype, read)
        else:  # extra state; a dictionary was taken apart
            small[key] = _empty(entry)
            state.setdefault(path[1], {})  # keeps the order
    _load(reader, small)
    for key, value in small.items():
        _, *parents, last = paths[key]
        place = state
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return state


def _require_all_bytes(folder: Path, metadata: Metadata) -> None:
    """Raise if a file of shards is missing or too short, before hours of copying what the others have."""
    ends: dict[str, int] = {}
    for each in metadata.storage_data.values():
        ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size < end:
            raise ValueError(f"{name} has {size} bytes of {end}")


def _empty(entry: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    """What a value of that kind is read into."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None


def _read_tensor(reader: SafeReader, key: str, entry: TensorStorageMetadata) -> Tensor:
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    _load(reader, {key: tensor})
    return tensor


def _load(reader: SafeReader, values: dict[str, Any]) -> None:
    """Read the values in place."""
    alone = {"no_dist": True} if dist.is_available() and dist.is_initialized() else {}  # other ranks do not take part
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # to say so is no news here
        load_safely(values, reader, **alone)
