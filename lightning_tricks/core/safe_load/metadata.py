"""The ``.metadata`` file of a sharded checkpoint: a pickle, from which only names and numbers are taken."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

# The classes in such a file besides dtypes: records of names, sizes and offsets.
ALLOWED_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # their module in Python 3.13
}

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """The place of a value, with the attributes that torch's reader uses."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str]


def read_metadata(file: Path) -> Metadata:
    """Read the metadata from a file.

    Raises:
        ValueError: If the file is damaged, or names anything but these classes.
    """
    with file.open("rb") as opened:
        unpickler = _Unpickler(opened)
        try:
            return _metadata(unpickler.load())
        except Exception as error:  # a damaged file can raise almost any exception
            if unpickler.refused:
                raise ValueError(f"{file} holds {unpickler.refused}, which can run code") from error
            raise ValueError(f"{file} is damaged ({type(error).__name__}).") from error


class _Stub:
    """Stands for an object of the pickle, and keeps its arguments or its state."""

    parts: Any = None

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __setstate__(self, parts: Any) -> None:
        if self.parts is not None:
            raise TypeError("an object with arguments and a state")
        self.parts = parts


class _Unpickler(pickle.Unpickler):
    """Returns stubs, of a new class for every name: a pickle can set attributes of the classes that it gets."""

    refused = ""

    @override
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if name not in ALLOWED_NAMES.get(module, ()):
            self.refused = f"{module}.{name}"
            raise pickle.UnpicklingError(self.refused)
        return type(name, (_Stub,), {})


def _metadata(stub: _Stub) -> Metadata:
    parts = stub.parts
    entries = {require_type(str, name): _entry(entry) for name, entry in parts["state_dict_metadata"].items()}
    paths = parts["planner_data"]
    if paths is not None:
        paths = {name: _path(name, path) for name, path in paths.items()}
        if paths.keys() != entries.keys():
            raise KeyError("a path without a value, or a value without a path")
    places = {_index(index): _place(place) for index, place in parts["storage_data"].items()}
    if len({(place.relative_path, place.offset) for place in places.values()}) < len(places):
        raise ValueError("two values in one place")
    return Metadata(entries, paths, places)


def _entry(stub: _Stub) -> TensorStorageMetadata | BytesStorageMetadata:
    if not stub.parts:
        return BytesStorageMetadata()
    dtype, *_ = stub.parts["properties"].parts  # the other properties are deprecated
    chunks = [ChunkStorageMetadata(_size(c.parts["offsets"]), _size(c.parts["sizes"])) for c in stub.parts["chunks"]]
    size = _size(stub.parts["size"])
    if not _tile(chunks, size):  # entries in no chunk would be arbitrary numbers
        raise ValueError("chunks that are not the full tensor")
    return TensorStorageMetadata(TensorProperties(require_type(torch.dtype, dtype)), size, chunks)


def _tile(chunks: list[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Whether every entry of a tensor is in exactly one chunk: all are inside, none overlap, and the counts agree."""
    boxes = sorted([*zip(c.offsets, c.sizes, strict=True)] for c in chunks if math.prod(c.sizes))
    for place, box in enumerate(boxes):
        if len(box) != len(size) or any(o < 0 or n < 0 or o + n > end for (o, n), end in zip(box, size, strict=True)):
            return False
        for other in boxes[place + 1 :]:
            if not box or other[0][0] >= sum(box[0]):
                break  # the boxes are sorted by their first offsets
            if all(a < b + m and b < a + n for (a, n), (b, m) in zip(box, other, strict=True)):
                return False
    return sum(math.prod(n for _, n in box) for box in boxes) == math.prod(size)


def _path(name: str, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    if (
        not path
        or not all(type(part) in (str, int) for part in require_type(tuple, path))
        or ".".join(map(str, path)) != name
    ):
        raise ValueError("a path that is not that of its name")
    return path


def _index(stub: _Stub) -> MetadataIndex:
    offset, number = stub.parts.get("offset"), stub.parts["index"]
    return MetadataIndex(
        require_type(str, stub.parts["fqn"]),
        None if offset is None else _size(offset),
        None if number is None else require_type(int, number),
    )


def _place(stub: _Stub) -> Place:
    file, offset, length = (stub.parts[name] for name in ("relative_path", "offset", "length"))
    transforms = [require_type(str, name) for name in stub.parts.get("transform_descriptors") or ()]
    if Path(require_type(str, file)).is_absolute() or ".." in Path(file).parts:
        raise ValueError("a file outside of the folder")
    return Place(file, require_type(int, offset), require_type(int, length), transforms)


def _size(stub: _Stub) -> torch.Size:
    (sizes,) = stub.parts
    return torch.Size(require_type(int, size) for size in sizes)


def require_type(kind: type[T], value: Any) -> T:
    """The value, if its type is exactly that one."""
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value
