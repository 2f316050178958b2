"""Values of any kind as plain ones, which a checkpoint may hold, and back."""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

SIMPLE = (type(None), bool, int, float, str)
# Marks of what is no list: a checkpoint of XLA has lists in place of tuples.
_TUPLE, _ARRAY = "__tuple__", "__ndarray__"


class NotPlain(TypeError):
    """A value that is neither a number, a text, a tensor or an array, nor a container of such."""


def plain(value: Any) -> Any:
    """A copy of a value in types that ``torch.load(weights_only=True)`` takes.

    Raises:
        NotPlain: For other objects.

    Example:
        >>> plain({"seen": {3}, "left": (1, 2.5)})
        {'seen': {3}, 'left': {'__tuple__': [1, 2.5]}}
    """
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind in SIMPLE:
        return value
    if kind in (list, deque):
        return list(value) if _is_simple(value) else [plain(item) for item in value]
    if kind in (set, frozenset):
        return {_key(item) for item in value}
    if kind is tuple:
        return {_TUPLE: plain([*value])}
    if isinstance(value, dict):
        return {_key(key): plain(item) for key, item in value.items()}
    if kind is Tensor:
        return value.detach().cpu().clone()
    if numpy is not None and isinstance(value, numpy.generic):
        return plain(value.item())
    if numpy is not None and kind is numpy.ndarray and value.dtype != object:
        content = torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8, device="cpu")
        return {_ARRAY: [value.dtype.str, [*value.shape], content]}
    raise NotPlain(f"{kind.__module__}.{kind.__name__}")


def _key(value: Any) -> Any:
    """What a set or the keys of a dictionary hold, which stays hashable."""
    return tuple(map(_key, value)) if type(value) is tuple else plain(value)


def unplain(value: Any) -> Any:
    """The value that ``plain`` was given, with lists and sets in place of deques and frozen sets."""
    if isinstance(value, list):
        return list(value) if _is_simple(value) else list(map(unplain, value))
    if not isinstance(value, dict):
        return value
    if [*value] == [_ARRAY]:
        dtype, shape, content = value[_ARRAY]
        return sys.modules["numpy"].frombuffer(bytearray(content.numpy().tobytes()), dtype).reshape(shape)
    if [*value] == [_TUPLE]:
        return tuple(unplain(value[_TUPLE]))
    return {key: unplain(item) for key, item in value.items()}


def _is_simple(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= {*SIMPLE}  # quick also for the order of millions of samples


def packed(value: Any) -> Any:
    """A plain value with bytes in place of its tensors of bytes, as random generators have them.

    It is compared by ``==``, and a worker sends it without shared memory.

    Example:
        >>> packed({"torch": torch.tensor([65, 66], dtype=torch.uint8)})
        {'torch': b'AB'}
    """
    if isinstance(value, Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: packed(item) for key, item in value.items()}
    return list(map(packed, value)) if isinstance(value, list) and not _is_simple(value) else value


def unpacked(value: Any) -> Any:
    """The plain value that ``packed`` was given."""
    if isinstance(value, bytes):
        return torch.tensor(bytearray(value), dtype=torch.uint8, device="cpu")
    if isinstance(value, dict):
        return {key: unpacked(item) for key, item in value.items()}
    return list(map(unpacked, value)) if isinstance(value, list) and not _is_simple(value) else value


def content(value: Any) -> bytes:
    """Bytes that are equal for equal values; torch's own of a tensor differ from time to time."""
    file = BytesIO()
    _ByContent(file).dump(value)
    return file.getvalue()


class _ByContent(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        numbers = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ((numbers, str(value.dtype), *value.shape),)
