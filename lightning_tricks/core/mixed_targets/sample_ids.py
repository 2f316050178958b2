"""Which sample every entry of a result belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.losses import is_loss
from lightning_tricks.core.mixed_targets.operations import (
    Function,
    cuts_behind_samples,
    is_elementwise,
    keeps_order,
    keeps_samples,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def sample_ids_of(
    func: Function,
    calls: Sequence[Call],
    results: Sequence[Tensor],
    known: Sequence[tuple[Tensor | None, int]],
    moved: bool,
    plan: LossPlan | None = None,
) -> Tensor | None:
    """The sample of every entry along a result's first dimension; None if it is unknown or differs between branches.

    Args:
        func: The function that was called.
        calls: The positional and the keyword arguments in every branch.
        results: The result in every branch.
        known: For every argument that is a target, its sample ids and its number of dimensions.
        moved: Whether the function only moves the entries of its first argument, which is a target.
        plan: The plan of the batch, which knows samples' numbers that need not be looked at.
    """
    if any(result.shape != results[0].shape for result in results):
        return None
    if moved:
        sample_ids, before, after = known[0][0], calls[0][0][0], results[0]
        if sample_ids is None:
            return None
        if cuts_behind_samples(func, calls[0][0]):
            return sample_ids
        if plan is not None and keeps_order(func) and (times := _times(plan, sample_ids, before, after)):
            return plan.repeated_ids(times)
        return _moved(func, sample_ids, calls, after)
    if any(sample_ids is None and ndim for sample_ids, ndim in known):
        return None
    if is_elementwise(func) and any(ndim not in (0, results[0].ndim) for _, ndim in known):
        return None  # broadcasting puts the samples along another dimension
    found = [sample_ids for sample_ids, _ in known if sample_ids is not None and len(sample_ids) == len(results[0])]
    if not found or not (keeps_samples(func, *calls[0]) or is_loss(func)):
        return None
    same = all(ids is found[0] or torch.equal(ids, found[0]) for ids in found)  # equal() waits for a GPU
    return found[0] if same else None


def _times(plan: LossPlan, sample_ids: Tensor, before: Tensor, after: Tensor) -> int:
    """How many entries of each sample there are after a reshape; 0 if they must be looked at."""
    times = plan.times_repeated(sample_ids)
    if times is None or not after.numel() or (times * len(after)) % len(before):
        return 0
    return times * len(after) // len(before)


def _moved(func: Function, sample_ids: Tensor, calls: Sequence[Call], result: Tensor) -> Tensor | None:
    """The sample ids after the same move: the function is called on a tensor of ids."""
    rows = []
    for args, kwargs in calls:
        ids = sample_ids.view(-1, *[1] * (args[0].ndim - 1)).expand(args[0].shape).contiguous()
        moved = func(ids, *args[1:], **kwargs)
        if not isinstance(moved, Tensor) or moved.shape != result.shape or not moved.numel():
            return None
        rows.append(moved.reshape(len(moved), -1))
    first = rows[0][:, 0]
    return first if all((row == first[:, None]).all() for row in rows) else None
