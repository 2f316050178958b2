"""Full weights from sharded checkpoints, the folders that Lightning saves under FSDP and DeepSpeed.

Neither a process group nor a GPU is needed, and nothing in the folders is executed.
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

from lightning_tricks.checkpoints.files import load
from lightning_tricks.checkpoints.stream import LazyTensor
from lightning_tricks.checkpoints.zero_folder import client_state, zero_weights
from lightning_tricks.core.adapters.record import Record, record_in
from lightning_tricks.core.safe_load.damage import unfinished
from lightning_tricks.core.safe_load.reader import SafeReader, load_safely

PREFIXES = ("state_dict", "model")  # Written by Lightning's ModelParallelStrategy (FSDP2) and its FSDPStrategy.


def lazy_weights(folder: Path) -> dict[str, Any]:
    """The state_dict of a sharded checkpoint with lazy tensors; under DeepSpeed the fp32 master weights.

    Raises:
        ValueError: If the folder is not a checkpoint, is incomplete, or is damaged.
        ImportError: If deepspeed is missing for a DeepSpeed checkpoint.
    """
    if reason := unfinished(folder):
        raise ValueError(f"{folder} is a folder, but not a checkpoint: {reason}.")
    read = zero_weights if (folder / "latest").is_file() else _fsdp_weights
    state = _report_damage(folder, partial(read, folder))
    if not state:
        raise ValueError(f"{folder} holds no weights under the names that Lightning gives them.")
    # All names of a tied weight share one lazy tensor, also with the reader replaced.
    lazy = {
        value: replace(value, read=partial(_report_damage, folder, value.read))
        for value in state.values()
        if isinstance(value, LazyTensor)
    }
    return {name: lazy[value] if isinstance(value, LazyTensor) else value for name, value in state.items()}


def sharded_averages(folder: Path) -> dict[str, bool]:
    """The callbacks that saved averages in shards, and whether the checkpoint's state_dict holds these averages.

    The state_dict holds them if the shards have the raw weights.

    Raises:
        ValueError: If the shards are damaged.
    """
    in_state_dict = {}
    for shards in sorted(file.parent for file in folder.glob("averages/*/.metadata")):
        try:
            names = SafeReader(shards).metadata.state_dict_metadata
        except ValueError as error:
            raise ValueError(f"{shards} is damaged or hostile: {error}") from error
        in_state_dict[shards.name] = any(name.startswith("raw/") for name in names)
    return in_state_dict


def record_of(folder: Path) -> Record | None:
    """What a sharded checkpoint says of its adapters; None if it has none.

    Raises:
        ValueError: If the file that would say so is damaged, or holds objects that could run code.
    """
    if (folder / "latest").is_file():
        return record_in(_report_damage(folder, partial(client_state, folder)))
    return record_in(_report_damage(folder, partial(load, folder / "meta.pt")))


def _report_damage(folder: Path, read: Callable[[], Any]) -> Any:
    """Call ``read()``; an error that it raises says that the folder is damaged."""
    try:
        return read()
    except ImportError:
        raise
    except (Exception, CheckpointException) as error:  # A damaged file can raise almost any exception.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = str(cause) if isinstance(cause, ValueError) else type(cause).__name__
        raise ValueError(f"{folder} is damaged or not a checkpoint: {' '.join(reason.split())}.") from error


def _fsdp_weights(folder: Path) -> dict[str, Any]:
    """The state_dict in a folder that FSDP saved: lazy tensors, and extra state read at once."""
    reader = SafeReader(folder)
    require_full_size(folder, reader.metadata)
    state: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    paths = {key: path for key, path in (reader.metadata.planner_data or {}).items() if path[0] in PREFIXES}
    for key, path in paths.items():
        entry = reader.metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata) and len(path) == 2:
            read = partial(_read_tensor, reader, key, entry)
            state[path[1]] = LazyTensor(entry.size, entry.properties.dtype, read)
        else:  # torch saves a dictionary of extra state value by value.
            extra[key] = _empty(entry)
            state.setdefault(path[1], {})  # Keeps the order of the names.
    _load(reader, extra)
    for key, value in extra.items():
        _, *parents, last = paths[key]
        dictionary = state
        for parent in parents:
            dictionary = dictionary.setdefault(parent, {})
        dictionary[last] = value
    return state


def require_full_size(folder: Path, metadata: Metadata) -> None:
    """Raise if a file of shards is missing or truncated, before hours of copying the others."""
    ends: dict[str, int] = {}
    for storage in metadata.storage_data.values():
        ends[storage.relative_path] = max(ends.get(storage.relative_path, 0), storage.offset + storage.length)
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size < end:
            raise ValueError(f"{name} has {size} bytes of {end}")


def _empty(entry: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    """An empty tensor to read a tensor into; None for another value."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None


def _read_tensor(reader: SafeReader, key: str, entry: TensorStorageMetadata) -> Tensor:
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    _load(reader, {key: tensor})
    return tensor


def _load(reader: SafeReader, values: dict[str, Any]) -> None:
    """Read the values in place, in this process only."""
    options = {"no_dist": True} if dist.is_available() and dist.is_initialized() else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # No process group is needed here.
        load_safely(values, reader, **options)
