"""What torch's functions do with their arguments; a function is known by its name, as a method or in ``torch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Function = Callable[..., Any]


def writes(func: Function) -> bool:
    """Whether a function writes into its first argument.

    >>> import torch
    >>> writes(torch.Tensor.add_), writes(torch.Tensor.__setitem__), writes(torch.add)
    (True, True, False)
    """
    name = func.__name__
    return name in _ASSIGN or (name.endswith("_") and not name.endswith("__"))


def uses_form_only(func: Function, args: Sequence[Any]) -> bool:
    """Whether a function takes of a target its shape, type and device only, as ``zeros_like``."""
    name = func.__name__
    if name.endswith("_like") or name.startswith("new_"):
        return True
    return name.endswith("_as") and type(args[0]) is Tensor


def moves(func: Function) -> bool:
    """Whether a function moves the values of its first argument and changes none, as ``reshape`` or an index."""
    return func.__name__ in _MOVE


def reorders(func: Function) -> bool:
    """Whether the values of a result are in an order of their own."""
    return func.__name__ in _REORDER


def reduces_samples(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is a sum or a mean over the first dimension, maybe among others."""
    if func.__name__ not in ("sum", "mean") or not isinstance(args[0], Tensor):
        return False
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = [dims] if isinstance(dims, int) else dims
    return not dims or any(dim in (0, -args[0].ndim) for dim in dims)


_ASSIGN = {
    "__setitem__",
    "__set__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ipow__",
    "__iand__",
    "__ior__",
}
_MOVE = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "__get__"),
    *("__getitem__", "index_select", "masked_select", "narrow", "select", "repeat", "repeat_interleave", "expand"),
    *("expand_as", "flip", "permute", "transpose", "t", "movedim", "swapaxes", "swapdims"),
}
_REORDER = {"sort", "argsort", "msort", "topk", "roll", "unique", "unbind", "split", "chunk"}
