"""What a tensor that is made of a part of a batch keeps of it: the memory format, the class and the attributes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_form_of(new: Tensor, old: Tensor, where: str, trick: str) -> Tensor:
    """What was made of a part of a batch, in the memory format and the class of the part, and with its attributes.

    Args:
        new: What was made of the part: cut, mixed or transformed.
        old: The part.
        where: The path of the part, for the error message.
        trick: The trick that has changed it, for the error message.

    Raises:
        MisconfigurationException: For an attribute that would have to be changed with the part.
    """
    return in_class_of(in_memory_of(new, old), old, where, trick)


def in_memory_of(new: Tensor, old: Tensor) -> Tensor:
    """A tensor in the memory format of another one; what is cut has gaps in memory, with which ``view()`` fails."""
    if new.ndim != old.ndim or old.is_contiguous():
        return new.contiguous()
    channels_last = _CHANNELS_LAST.get(old.ndim)
    if channels_last is not None and old.is_contiguous(memory_format=channels_last):
        return new.contiguous(memory_format=channels_last)
    return new


def in_class_of(new: Tensor, old: Tensor, where: str, trick: str) -> Tensor:
    """A tensor in the class of another one, with its attributes, which operations of torch leave behind.

    Raises:
        MisconfigurationException: For an attribute with as many entries as a dimension that has changed and as no
            other one: a name for each sample, but not for each column.
    """
    kind = type(old)
    if kind is Tensor or _has_other_storage(old):
        return new
    new = new if isinstance(new, kind) else new.as_subclass(kind)
    changed = {size for size, now in zip(old.shape, new.shape, strict=False) if size != now} or {len(old)}
    of_others = {size for size, now in zip(old.shape[1:], new.shape[1:], strict=False) if size == now}
    for name, value in vars(old).items():
        if name in vars(new):  # the class has seen to it
            continue
        if _entries(value) in changed - of_others:
            raise MisconfigurationException(
                f"{trick} changes {where}, a {kind.__name__} with {_entries(value)} entries in its attribute {name},"
                " and cannot know whether it must be changed as well: put it into the batch beside the tensor, or have"
                f" {kind.__name__}.__torch_function__ set it."
            )
        setattr(new, name, value)
    return new


def plain(x: Tensor) -> Tensor:
    """A tensor without its class, whose methods may need the attributes that operations of torch leave behind."""
    return x if _has_other_storage(x) else x.as_subclass(Tensor)


def values_of(x: Tensor) -> Tensor:
    """The values of a tensor without its class and its graph."""
    return plain(x).detach()


def _has_other_storage(x: Tensor) -> bool:
    """Whether a tensor holds its values in other tensors, as a DTensor does, and makes its results by itself."""
    return type(x).__torch_dispatch__ != Tensor.__torch_dispatch__


def require_no_attributes(target: Tensor, where: str, trick: str) -> None:
    """Raise for a target whose class has attributes, which a target that follows a plan for its losses has not.

    Raises:
        MisconfigurationException: For such a target.
    """
    if type(target) is not Tensor and vars(target):
        raise MisconfigurationException(
            f"{trick} makes a target of a class of its own, and cannot keep what {where}, a {type(target).__name__},"
            f" has besides its values, {', '.join(vars(target))}: give the batch the target as a plain tensor,"
            " as_subclass(torch.Tensor), in on_after_batch_transfer."
        )


def _entries(value: Any) -> int | None:
    """The number of entries of an array or a list; None for anything else."""
    if isinstance(value, list | tuple):
        return len(value)
    return next(iter(getattr(value, "shape", ())), None)
