"""Writes through ``Tensor.data``, which raise no version: a watch for them, and what undoes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_tricks.core.weights.tensors import local_part

_DATA: Any = torch.Tensor.data  # the attribute itself, as torch defines it
_watches: list[tuple[Mapping[int, Any], Callable[[Tensor], None]]] = []


@contextmanager
def watching_data(watched: Mapping[int, Any], touch: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``touch(tensor)`` before the ``.data`` of a watched tensor is read or set inside the block.

    Nothing else tells that a tensor may be written to: an operation on ``.data`` leaves the version and the memory of
    the tensor as they are. Within the block the attribute of ``torch.Tensor`` is a property, which costs a tenth of a
    microsecond.

    Args:
        watched: A dictionary with the ids of the tensors as keys, which may change in the block.
        touch: The function that is called.

    Example:
        >>> weight, other, seen = torch.ones(2), torch.ones(2), []
        >>> with watching_data({id(weight): "weight"}, seen.append):
        ...     other.data.mul_(3), weight.data.mul_(2)
        (tensor([3., 3.]), tensor([2., 2.]))
        >>> len(seen), weight._version
        (1, 0)
    """
    entry = (watched, touch)
    _watches.append(entry)
    if len(_watches) == 1:
        torch.Tensor.data = property(_read, _set)  # type: ignore[assignment]
    try:
        yield
    finally:
        del _watches[next(place for place, found in enumerate(_watches) if found is entry)]
        if not _watches:
            del torch.Tensor.data  # the attribute of its base class is found again


def versions(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Pairs of numbers that change when a tensor is written to or its ``.data`` is set."""
    # A sparse tensor has no memory of its own to point to.
    return [(0 if t.is_inference() else t._version, t.data_ptr() if t.layout == torch.strided else 0) for t in tensors]


def data_of(tensor: Tensor) -> Tensor:
    """The ``.data`` of a tensor, unseen by watches."""
    return _DATA.__get__(tensor)


def restore_data(tensor: Tensor, data: Tensor, contents: Tensor) -> None:
    """Give a tensor the memory that it had, with its contents.

    Args:
        tensor: The tensor, whose ``.data`` may have been set.
        data: A tensor of the memory that it had.
        contents: A copy of what it held.
    """
    if not is_freed(data):
        give_memory(tensor, data)
        data.copy_(contents)


def give_memory(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor the memory of another one, which is mostly its own; one that holds tensors keeps these."""
    if isinstance(tensor, DTensor):
        moves = local_part(tensor).data_ptr() != local_part(data).data_ptr()
    else:
        moves = type(tensor) in (Tensor, nn.Parameter) or not is_traceable_wrapper_subclass(tensor)
    if moves:
        tensor.data = data


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's memory was freed, by FSDP2, which makes full weights anew for every use."""
    plain = tensor.layout == torch.strided and not (tensor.is_nested or is_traceable_wrapper_subclass(tensor))
    return plain and tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def _read(tensor: Tensor) -> Tensor:
    _touch(tensor)
    return _DATA.__get__(tensor)


def _set(tensor: Tensor, data: Tensor) -> None:
    _touch(tensor)
    _DATA.__set__(tensor, data)


def _touch(tensor: Tensor) -> None:
    for watched, touch in tuple(_watches):
        if id(tensor) in watched:
            touch(tensor)
