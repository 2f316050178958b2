"""Values of any kind as plain ones, which a checkpoint may hold, and back."""

from __future__ import annotations

import pickle
import sys
from collections import deque
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

SIMPLE = (type(None), bool, int, float, str)
_ARRAY = "ndarray"  # the mark of an array, which is held as a tensor of its bytes


class NotPlain(TypeError):
    """A value that is neither a number, a text, a tensor or an array, nor a container of such."""


def plain(value: Any) -> Any:
    """A copy of a value in types that ``torch.load(weights_only=True)`` takes.

    Raises:
        NotPlain: For other objects.

    Example:
        >>> plain({"seen": {3}, "left": (1, 2.5)})
        {'seen': {3}, 'left': (1, 2.5)}
    """
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind in SIMPLE:
        return value
    if kind in (list, deque):
        simple = set(map(type, value)) <= {*SIMPLE}  # quick also for the order of millions of samples
        return list(value) if simple else [plain(item) for item in value]
    if kind in (set, frozenset):
        return {plain(item) for item in value}
    if kind is tuple:
        return tuple(plain(item) for item in value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if kind is Tensor:
        return value.detach().cpu().clone()
    if numpy is not None and isinstance(value, numpy.generic):
        return plain(value.item())
    if numpy is not None and kind is numpy.ndarray and value.dtype != object:
        content = torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8, device="cpu")
        return (_ARRAY, value.dtype.str, value.shape, content)
    raise NotPlain(f"{kind.__module__}.{kind.__name__}")


def unplain(value: Any) -> Any:
    """The value that ``plain`` was given, with lists and sets in place of deques and frozen sets."""
    if isinstance(value, tuple) and len(value) == 4 and value[0] == _ARRAY:
        _, dtype, shape, content = value
        return sys.modules["numpy"].frombuffer(bytearray(content.numpy().tobytes()), dtype).reshape(shape)
    if isinstance(value, tuple):
        return tuple(map(unplain, value))
    if isinstance(value, list):
        return list(value) if set(map(type, value)) <= {*SIMPLE} else list(map(unplain, value))
    return {key: unplain(item) for key, item in value.items()} if isinstance(value, dict) else value


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
    return tuple(map(packed, value)) if isinstance(value, tuple) else value


def unpacked(value: Any) -> Any:
    """The plain value that ``packed`` was given."""
    if isinstance(value, bytes):
        return torch.tensor(bytearray(value), dtype=torch.uint8, device="cpu")
    if isinstance(value, dict):
        return {key: unpacked(item) for key, item in value.items()}
    return tuple(map(unpacked, value)) if isinstance(value, tuple) else value


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
