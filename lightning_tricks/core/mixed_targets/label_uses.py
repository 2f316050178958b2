"""Uses of integers as labels: they are made into codes, or choose among the numbers of a network.

A mask of places in a sequence multiplies such numbers as well, and the length of a sequence is the index of its last
vector. So a product counts if its factor is a code (as by ``one_hot``) or one number for each sample, and an index if
it chooses single numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_tricks.core.mixed_targets.losses import is_loss
from lightning_tricks.core.mixed_targets.operations import Function, divides, is_elementwise, joins, weighs

IsLabel = Callable[[Any], bool]  # whether an argument is a tensor of integers that may be labels


def makes_codes(func: Function, args: Sequence[Any], tensors: Sequence[Tensor], is_label: IsLabel) -> bool:
    """Whether a function makes codes of labels: compares them with classes, or looks them up in a table.

    Args:
        func: The function that was called.
        args: Its arguments, with that which it is called on as the first one.
        tensors: All tensors among its arguments.
        is_label: Whether an argument may be labels.
    """
    name = func.__name__.strip("_")
    if name == "setitem":  # codes[range(n), labels] = 1, but not table[labels] = 1
        return isinstance(args[1], tuple) and any(map(is_label, args[1]))
    if name in ("eq", "ne", "lt", "le", "gt", "ge"):  # with classes, or with each other; lengths are so with places
        return len(tensors) > 1 and (name in ("eq", "ne") or all(map(is_label, tensors)))
    return name in _ENCODE or (name in _LOOK_UP and not is_label(args[0])) or name == "embedding"


def picks_numbers(func: Function, args: Sequence[Any], samples: int, is_label: IsLabel) -> bool:
    """Whether a function chooses single numbers of its first argument by labels: ``logits[range(n), labels]``.

    The index of a vector, such as that of the last word, chooses all of its numbers.

    Args:
        func: The function that was called.
        args: Its arguments, with that which it is called on as the first one.
        samples: The number of samples in the batch.
        is_label: Whether an argument may be labels.
    """
    name, value = func.__name__.strip("_"), args[0]
    if name in _PICK:
        index = next((each for each in args[1:] if is_label(each)), None)
        sides = [] if index is None else zip(index.shape, index.stride(), strict=True)
        return index is not None and not any(size > 1 and not stride for size, stride in list(sides)[1:])
    if name == "index_select":
        return args[1] not in (0, -value.ndim) and is_label(args[2])
    if name != "getitem":
        return False
    if is_label(args[1]):
        return value.ndim == 1 and len(value) != samples
    keys = args[1] if isinstance(args[1], tuple) else ()
    if len(keys) != value.ndim or any(type(key) is slice for key in keys[1:]):
        return False
    return any(map(is_label, keys[1:])) or (is_label(keys[0]) and len(value) != samples)


def sums_by_labels(func: Function, args: Sequence[Any], samples: int, is_label: IsLabel) -> bool:
    """Whether a function sums the numbers of the samples of each class, as for means: ``sums.index_add(0, y, x)``."""
    return func.__name__.strip("_") in _SUM and any(is_label(each) and each.numel() == samples for each in args[1:])


def weighs_samples(func: Function, result: Any, samples: int) -> bool:
    """Whether a function multiplies the number of each sample by one, or chooses between two."""
    of_samples = isinstance(result, Tensor) and result.numel() == samples
    return multiplies(func) or (weighs(func) and not divides(func) and of_samples)


def leaves_samples_out(func: Function, args: Sequence[Any], samples: int) -> bool:
    """Whether a function, if its index is a mask, takes the numbers of some samples."""
    return func.__name__ in ("__getitem__", "masked_select") and args[0].numel() == samples


def multiplies(func: Function) -> bool:
    """Whether a function multiplies its arguments, and sums."""
    return func.__name__.strip("_") in _MULTIPLY


def is_layer(func: Function, others: Sequence[Tensor]) -> bool:
    """Whether a function is a part of a network: with weights or other outputs, and no formula of a loss.

    Args:
        func: The function that was called.
        others: The tensors with a graph that are its other arguments.
    """
    return any(other.numel() > 1 for other in others) and not (is_elementwise(func) or is_loss(func) or joins(func))


_ENCODE = {"one_hot", "scatter"}
_LOOK_UP = {"getitem", "index_select", "gather", "take", "take_along_dim"}
_PICK = {"gather", "take", "take_along_dim"}
_SUM = {"index_add", "index_reduce", "scatter_add", "scatter_reduce"}
_MULTIPLY = {
    *("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "vecdot", "einsum", "tensordot", "linear"),
}
