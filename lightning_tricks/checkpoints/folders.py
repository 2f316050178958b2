"""Whole weights from sharded checkpoints: the folders that Lightning saves under FSDP and DeepSpeed.

No process group and no GPU is needed. The folders are read by torch's and DeepSpeed's own readers, which unpickle: read
only folders that you trust.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

PREFIXES = ("state_dict.", "model.")  # Lightning's ModelParallelStrategy (FSDP2), its FSDPStrategy


def whole_weights(folder: Path) -> dict[str, Any]:
    """The state_dict of a sharded checkpoint, in memory; under DeepSpeed fp32 masters and buffers, no extra state.

    Raises:
        ValueError: If the folder is no checkpoint, or damaged.
        ImportError: For a DeepSpeed checkpoint, if deepspeed is missing.
    """
    if (folder / ".metadata").is_file():
        read = _from_shards
    elif (folder / "latest").is_file():
        read = _from_zero
    else:
        raise ValueError(f"{folder} is a folder, but no checkpoint: it has neither .metadata (FSDP) nor latest (ZeRO).")
    try:
        state = read(folder)
    except ImportError:
        raise
    except (Exception, CheckpointException) as error:  # a damaged file raises almost anything
        raise ValueError(f"{folder} is damaged or not a checkpoint ({type(error).__name__}).") from error
    if not state:
        raise ValueError(f"{folder} holds no weights under the names that Lightning gives them.")
    return state


def averages_beside(folder: Path) -> dict[str, bool]:
    """The callbacks with averages in shards of their own, and whether the state_dict holds these averages.

    It does if the shards have the raw weights.

    Raises:
        ValueError: If the shards are damaged.
    """
    found = {}
    for shards in sorted(file.parent for file in folder.glob("averages/*/.metadata")):
        try:
            names = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
        except Exception as error:  # a damaged file raises almost anything
            raise ValueError(f"{shards} is damaged ({type(error).__name__}).") from error
        found[shards.name] = any(name.startswith("raw/") for name in names)
    return found


def _from_shards(folder: Path) -> dict[str, Any]:
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(PREFIXES)
    }
    alone = {"no_dist": True} if dist.is_available() and dist.is_initialized() else {}  # other ranks do not take part
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # to say so is no news here
        dcp.load(found, storage_reader=reader, **alone)
    state: dict[str, Any] = {}
    for name, value in found.items():
        _, *parents, last = metadata.planner_data[name]  # extra state that is a dictionary was taken apart
        place = state
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return state


def _from_zero(folder: Path) -> dict[str, Tensor]:
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise ImportError(
            "a DeepSpeed checkpoint needs the package deepspeed: pip install 'lightning-tricks[deepspeed]'"
        ) from error
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {name.removeprefix("_forward_module."): value for name, value in state.items()}
