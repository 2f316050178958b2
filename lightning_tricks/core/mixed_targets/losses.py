"""Losses of weighted or of some samples, by pure functions; apart from the target, a subclass of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.divisors import Loss, counted, divisor
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan, Weight
from lightning_tricks.core.mixed_targets.operations import (
    Function,
    cuts_behind_samples,
    is_elementwise,
    is_loss,
    keeps_order,
    keeps_samples,
)
from lightning_tricks.core.mixed_targets.scores import Call, SampleScores, summed_losses, weights_in_loss


def planned_loss(func: Loss, calls: Sequence[dict[str, Any]], sample_ids: Tensor | None, plan: LossPlan) -> Tensor:
    """Compute a loss of torch by a plan, from the targets of all branches.

    With weights ``u_i`` a mean ``sum_i(l_i) / n`` becomes ``sum_i(u_i * l_i) / n`` with the same n (which may be a sum
    of class weights, or leave ignored entries out). If samples are chosen, it is the loss of a batch of these alone.

    Args:
        func: The loss function.
        calls: The arguments by name for every branch, with a ``reduction`` to one number.
        sample_ids: The sample of every entry along the first dimension; None if it is unknown.
        plan: The plan of the batch.

    Raises:
        AmbiguousSamples: If it is not clear which samples the values belong to.
    """
    elements = [func(**{**call, "reduction": "none"}) for call in calls]
    if sample_ids is None or len(sample_ids) != len(elements[0]) or func.__name__ == "ctc_loss":
        raise AmbiguousSamples(ambiguous_samples(func))
    weights = [_by_entry(weight, sample_ids) for weight in plan.weights(len(calls))]
    values, reduction, mask = _sum(elements, weights), calls[0]["reduction"], counted(calls[0])
    chosen = _chosen(func, reduction, values, sample_ids, plan, mask)
    if chosen is None:
        note_loss(func, calls[0], plan)
        loss = _sum([_reduced(func, term) for term in zip(calls, elements, weights, strict=True)], [1.0] * len(calls))
        divisor = {"sum": 1, "batchmean": len(values)}.get(reduction)
        if plan.record is None:
            return loss
        return _recorded(loss, values, weights_in_loss(func, calls[0]), sample_ids, plan, divisor)
    entries, factor = chosen
    calls = [_narrowed(call, entries) for call in calls]
    note_loss(func, calls[0], plan)
    weights = [weight[entries] if isinstance(weight, Tensor) else weight for weight in weights]
    kept = zip(calls, [element[entries] for element in elements], weights, strict=True)
    return _sum([_reduced(func, term) for term in kept], [factor] * len(calls))


def planned_reduction(
    func: Loss, calls: Sequence[Call], sample_ids: Tensor | None, plan: LossPlan, entry_weights: Tensor | None = None
) -> Tensor:
    """Compute a sum or mean over losses of samples, which was written by hand, by a plan.

    Args:
        func: The function, a sum or a mean.
        calls: The positional and the keyword arguments in every branch.
        sample_ids: The sample of every entry along the first dimension; None if it is unknown.
        plan: The plan of the batch.
        entry_weights: How much every loss counts, for the record; None if all count as 1.

    Raises:
        AmbiguousSamples: If it is not clear which samples the values belong to.
    """
    args, kwargs = calls[0]
    if sample_ids is None or len(sample_ids) != len(args[0]):
        raise AmbiguousSamples(ambiguous_samples(func))
    weights = [_by_entry(weight, sample_ids) for weight in plan.weights(len(calls))]
    values, factor = _sum([arguments[0] for arguments, _ in calls], weights), 1.0
    if (chosen := _chosen(func, func.__name__, values, sample_ids, plan, None)) is not None:
        values, factor = values[chosen[0]], chosen[1]
    loss = func(values, *args[1:], **kwargs) * factor
    if plan.divisors is not None and (unclear := plan.divisors.note_reduction(func, values, loss)):
        raise AmbiguousSamples(unclear)
    if plan.record is None:
        return loss
    divisor = 1 if func.__name__ == "sum" else values.numel() // loss.numel()
    return _recorded(loss, values, entry_weights, sample_ids, plan, divisor)


def _recorded(
    loss: Tensor, values: Tensor, weights: Tensor | None, sample_ids: Tensor, plan: LossPlan, divisor: float | None
) -> Tensor:
    """A sum or mean of losses, whose samples' losses are recorded and change if it is divided later."""
    scores = SampleScores(values, weights, sample_ids, plan.samples, divisor)
    assert plan.record is not None
    plan.record(scores.values)
    return loss if divisor is None or loss.ndim else summed_losses(loss, [(scores, divisor)])


def note_loss(func: Loss, call: dict[str, Any], plan: LossPlan) -> None:
    """Note by what a loss of torch divides the sum over its targets, if that is asked for.

    Raises:
        AmbiguousSamples: If the loss does not say by what it divides.
    """
    if plan.divisors is not None and (unclear := plan.divisors.note_loss(func, call)):
        raise AmbiguousSamples(unclear)


class AmbiguousSamples(RuntimeError):
    """It is not clear which samples the values of a result belong to."""


def ambiguous_samples(func: Loss) -> str:
    """The message of that error."""
    return (
        f"{func.__name__}() of the target, where samples count differently and it is not clear which sample each value"
        " belongs to. Keep the samples in the first dimension and end with mean(), or with a loss of"
        " torch.nn.functional."
    )


def _chosen(
    func: Loss, reduction: str, losses: Tensor, sample_ids: Tensor, plan: LossPlan, mask: Tensor | None
) -> tuple[Tensor, float] | None:
    """The indices of the entries whose samples count, and a factor of the mean; None if all count."""
    if plan.choose is None:
        return None
    if reduction == "sum" or len(sample_ids) < plan.samples:
        raise AmbiguousSamples(
            f"{func.__name__}() of the target, which sums losses of which some are left out, or sees only a part of the"
            " samples. Take the mean over all of them."
        )
    choice = plan.choose(SampleScores(losses, mask, sample_ids, plan.samples, None).values)
    times = plan.times_repeated(sample_ids)
    if choice is None or times == 1:
        return choice
    samples, factor = choice
    if times is None:  # the number of entries is unknown, for which a GPU waits
        return torch.isin(sample_ids, samples).nonzero().flatten(), factor
    return (samples[:, None] * times + torch.arange(times, device=samples.device)).flatten(), factor


def _narrowed(call: dict[str, Any], entries: Tensor) -> dict[str, Any]:
    """The same call for some entries of the target, and of all arguments with the dimensions of the first one."""
    first = next(iter(call.values()))
    return {
        name: value[entries]
        if isinstance(value, Tensor)
        and (name == "target" or (value.ndim == first.ndim and name != "pos_weight"))
        and len(value) == len(first)
        else value
        for name, value in call.items()
    }


def _reduced(func: Loss, each: tuple[dict[str, Any], Tensor, Weight]) -> Tensor:
    call, elements, weight = each
    if not isinstance(weight, Tensor):
        loss = func(**call)
        return loss if weight == 1.0 else weight * loss
    total = (elements * _shaped(weight, elements)).sum()
    return total if call["reduction"] == "sum" else total / divisor(func, call, elements.numel())


def _sum(values: Sequence[Tensor], weights: Sequence[Weight]) -> Tensor:
    """The weighted sum of the values; a weight is a number, or has one entry per entry of the first dimension."""
    terms = [
        value if isinstance(weight, float) and weight == 1.0 else _shaped(weight, value) * value
        for value, weight in zip(values, weights, strict=True)
    ]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _by_entry(weight: Weight, sample_ids: Tensor) -> Weight:
    return weight[sample_ids] if isinstance(weight, Tensor) else weight


def _shaped(weight: Weight, value: Tensor) -> Weight:
    return weight.to(value.dtype).view(-1, *[1] * (value.ndim - 1)) if isinstance(weight, Tensor) else weight


# -- the sample that every entry of a result belongs to ---------------------------------------------------------------


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
