"""Which sample each entry of a result belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.losses import is_loss
from lightning_tricks.core.mixed_targets.operations import Function, is_elementwise, keeps_samples

Call = tuple[tuple[Any, ...], dict[str, Any]]


def sample_ids_of(
    func: Function,
    calls: Sequence[Call],
    results: Sequence[Tensor],
    known: Sequence[tuple[Tensor | None, int]],
    moved: bool,
) -> Tensor | None:
    """The sample of each entry along a result's first dimension, the same in all branches; None if that is not clear.

    Args:
        func: What was computed.
        calls: Its arguments in each branch.
        results: What came of it in each branch.
        known: The owners of each argument that has some, and its number of dimensions.
        moved: Whether the function only moves the entries of the first argument, which is one of those.
    """
    if any(each.shape != results[0].shape for each in results):
        return None
    if moved:
        return None if known[0][0] is None else _moved(func, known[0][0], calls, results[0])
    if any(owners is None and ndim for owners, ndim in known):
        return None
    if is_elementwise(func) and any(ndim not in (0, results[0].ndim) for _, ndim in known):
        return None  # broadcast along another dimension
    found = [owners for owners, _ in known if owners is not None and len(owners) == len(results[0])]
    if not found or not (keeps_samples(func, *calls[0]) or is_loss(func)):
        return None
    same = all(each is found[0] or torch.equal(each, found[0]) for each in found)  # a GPU is waited for if they are two
    return found[0] if same else None


def _moved(func: Function, owners: Tensor, calls: Sequence[Call], result: Tensor) -> Tensor | None:
    """The owners are moved as the entries were."""
    rows = []
    for args, kwargs in calls:
        marks = owners.view(-1, *[1] * (args[0].ndim - 1)).expand(args[0].shape).contiguous()
        moved = func(marks, *args[1:], **kwargs)
        if not isinstance(moved, Tensor) or moved.shape != result.shape or not moved.numel():
            return None
        rows.append(moved.reshape(len(moved), -1))
    first = rows[0][:, 0]
    return first if all((each == first[:, None]).all() for each in rows) else None
