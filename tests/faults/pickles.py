"""Pickles that name nothing but what torch writes into .metadata, and yet change what all of the process uses."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from enum import EnumMeta
from typing import Any

_METADATA = b"ctorch.distributed.checkpoint.metadata\n"
_ENUM = _METADATA + b"_MEM_FORMAT_ENCODING\n"
_GIVEN = b"(N}V%s\n%sstb"  # the state (None, {name: value}): an attribute is set

# Each leaves one object on the stack.
CRAFTED: dict[str, bytes] = {
    "an attribute of a class": _METADATA + b"Metadata\n" + _GIVEN % (b"version", b"I1\n"),
    "a method of a class": _METADATA + b"MetadataIndex\n" + _GIVEN % (b"__eq__", _METADATA + b"Metadata\n"),
    "a class of a path": b"cpathlib\nPosixPath\n" + _GIVEN % (b"open", b"I1\n"),
    "a class from the memo": _METADATA + b"StorageMeta\np999\n0g999\n" + _GIVEN % (b"modules", b"I1\n"),
    "the name of a class": _METADATA + b"ChunkStorageMetadata\n" + _GIVEN % (b"__name__", b"Vother\n"),
    "a class by its dictionary": _METADATA + b"StorageMeta\n}Vmodules\nI1\nsb",
    "a class as a dictionary": _METADATA + b"StorageMeta\nVmodules\nI1\ns",
    "the dictionary of a function": b"ctorch.serialization\n_get_layout\n}Vcache\n}sb",
    "the defaults of a function": b"ctorch.serialization\n_get_layout\n" + _GIVEN % (b"__defaults__", b"(I1\nt"),
    "a member of an enum": _ENUM + b"(I0\ntR}V_value_\nI5\nsb",
    "a class of enums": _ENUM + _GIVEN % (b"TORCH_CHANNELS_LAST", b"I1\n"),
    "a dtype": b"ctorch\nfloat32\n}Vname\nI1\nsb",
    "a dtype as a function": b"ctorch\nfloat32\n(tR",
    "an attribute of a name": _METADATA + b"Metadata.__init__\n" + _GIVEN % (b"__doc__", b"I1\n"),
    "a function of torch": b"ctorch\nset_default_dtype\n(ctorch\nfloat64\ntR",
}


def behind(crafted: bytes, content: bytes) -> bytes:
    """The pickle with that behind its object, which is then taken off the stack."""
    return content[:-1] + crafted + b"0."


def state_of(allowed: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """What can be changed of the objects with these names, by module."""
    state = {}
    for module in allowed:
        for name in allowed[module]:
            each = getattr(importlib.import_module(module), name, None) if module != "pathlib._local" else None
            state[f"{module}.{name}"] = _state(each)
    return state


def _state(each: Any) -> list[Any]:
    own = {key: dict(held) if isinstance(held, dict) else held for key, held in getattr(each, "__dict__", {}).items()}
    members = [dict(vars(member)) for member in each] if isinstance(each, EnumMeta) else []
    return [own, members, getattr(each, "__name__", None), getattr(each, "__defaults__", None)]
