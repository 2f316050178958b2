"""Losses in which samples have their own weights, or only some samples count, by torch's own loss functions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.divisors import WEIGHED, Loss, counted, divisor
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan, Weight
from lightning_tricks.core.mixed_targets.scores import SampleScores, summed_losses


@cache
def _signature(func: Loss) -> inspect.Signature | None:
    if getattr(func, "__module__", None) != "torch.nn.functional":
        return None
    signature = inspect.signature(func)
    return signature if "reduction" in signature.parameters else None


def is_loss(func: Loss) -> bool:
    """Whether a function is one of torch's losses: one in ``torch.nn.functional`` with a ``reduction``.

    >>> is_loss(torch.nn.functional.cross_entropy), is_loss(torch.nn.functional.softmax)
    (True, False)
    """
    return _signature(func) is not None


def arguments(func: Loss, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss by name, defaults included."""
    signature = _signature(func)
    assert signature is not None, "is_loss"
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


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
        return _recorded(loss, values, entry_weights_of(func, calls[0]), sample_ids, plan, divisor)
    entries, factor = chosen
    calls = [_narrowed(call, entries) for call in calls]
    note_loss(func, calls[0], plan)
    weights = [weight[entries] if isinstance(weight, Tensor) else weight for weight in weights]
    kept = zip(calls, [element[entries] for element in elements], weights, strict=True)
    return _sum([_reduced(func, term) for term in kept], [factor] * len(calls))


def planned_reduction(
    func: Loss,
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    sample_ids: Tensor | None,
    plan: LossPlan,
    entry_weights: Tensor | None = None,
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


def entry_weights_of(func: Loss, call: Mapping[str, Any]) -> Tensor | None:
    """How much the entries of a loss count in what it divides, or the step does; None if all count as 1.

    A mask is the weight of binary losses, too. Their own mean divides by the number of all entries.
    """
    if (mask := counted(call)) is not None:
        return mask
    by_entry = func.__name__ in WEIGHED or (func.__name__ in _OF_ENTRIES and call["reduction"] != "mean")
    weight = call.get("weight") if by_entry else None
    return None if weight is None else weight.expand(call["target"].shape)


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


_OF_ENTRIES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")  # over the number of entries


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
