"""Sharded checkpoints read as tensors and plain values, without executing what is in them."""

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
    """Reads a sharded checkpoint: the metadata only once and without unpickling it, and values with their checksums.

    Raises:
        ValueError: If the metadata is damaged, or names anything but records.
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


class _SafePlanner(DefaultLoadPlanner):
    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            plain = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{read_item.storage_index.fqn} was not read, since {UNSAFE}") from error
        again = io.BytesIO()
        torch.save(plain, again)  # torch's own planner unpickles it
        again.seek(0)
        super().load_bytes(read_item, again)


def load_safely(values: dict[str, Any], reader: SafeReader, *, strict: bool = True, **options: Any) -> None:
    """Read values in place, as ``torch.distributed.checkpoint.load`` does.

    Args:
        values: Tensors by key, which are read into; None for another value, which is replaced.
        reader: The reader of the checkpoint folder.
        strict: Whether the checkpoint must have all keys.
        options: Further arguments for ``torch.distributed.checkpoint.load``.

    Raises:
        CheckpointException: If a file is damaged, or holds more than tensors and plain values.
    """
    dcp.load(values, storage_reader=reader, planner=_SafePlanner(allow_partial_load=not strict), **options)
