"""Checkpoints read as tensors and plain values: other readers unpickle, and so run, what is in them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from lightning_tricks.core.safe_load.damage import UNSAFE, damage
from lightning_tricks.core.safe_load.metadata import read_metadata


class SafeReader(dcp.FileSystemReader):
    """Reads the metadata once, not for each tensor, and only if it is made of records; compares the values' checksums.

    Raises:
        ValueError: If it names anything else, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = read_metadata(folder / ".metadata")
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            with (Path(self.path) / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                if wrong := damage(io.BytesIO(file.read(place.length))):
                    raise ValueError(f"{item.storage_index.fqn} in {file.name}: {wrong}")
        return super().read_data(plan, planner)


class _PlainPlanner(DefaultLoadPlanner):
    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            plain = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{read_item.storage_index.fqn} was not read, since {UNSAFE}") from error
        again = io.BytesIO()
        torch.save(plain, again)  # which torch's own planner unpickles
        again.seek(0)
        super().load_bytes(read_item, again)


def load_safely(values: dict[str, Any], reader: SafeReader, *, strict: bool = True, **options: Any) -> None:
    """Read the values in place, as ``torch.distributed.checkpoint.load`` with these options.

    Args:
        values: Tensors to read into, and None for what is no tensor and is put in its place.
        reader: Of the folder.
        strict: Whether all of them must be there.
        options: Of torch.

    Raises:
        CheckpointException: If a file is damaged, or holds more than plain values.
    """
    dcp.load(values, storage_reader=reader, planner=_PlainPlanner(allow_partial_load=not strict), **options)


def load_zero_file(file: Path) -> Any:
    """What DeepSpeed has written into a file, its tensors memory-mapped.

    Raises:
        ValueError: If it is damaged, or holds more than plain values and records of DeepSpeed's.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    own = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]  # which run nothing
    try:
        with torch.serialization.safe_globals(own):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file raises almost anything
        raise ValueError(unread(file)) from error


def unread(file: Path) -> str:
    """Why torch has refused to read a file."""
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # the file is damaged in a way that stops this too
        refused = []
    if not refused:
        return f"{file} is damaged or not a checkpoint."
    return f"{file} was not read: it holds {', '.join(sorted(refused))}, and {UNSAFE}."
