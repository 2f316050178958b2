"""Losses by samples: each sample with a weight of its own, or some samples only, by torch's own loss functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Loss = Callable[..., Tensor]
Weight = float | Tensor  # of the samples: one for all, or one each of shape (B,)
Choose = Callable[[Tensor], tuple[Tensor, float] | None]
"""Takes the loss of each sample, (B,), and gives the numbers of those that count and a factor; None for all."""


@cache
def _signature(func: Loss) -> inspect.Signature | None:
    if getattr(func, "__module__", None) != "torch.nn.functional":
        return None
    signature = inspect.signature(func)
    return signature if "reduction" in signature.parameters else None


def is_loss(func: Loss) -> bool:
    """Whether a function is one of torch's losses: in ``torch.nn.functional`` and with a ``reduction``.

    >>> is_loss(torch.nn.functional.cross_entropy), is_loss(torch.nn.functional.softmax)
    (True, False)
    """
    return _signature(func) is not None


def arguments(func: Loss, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss by their names, with its defaults."""
    signature = _signature(func)
    assert signature is not None, "is_loss"
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def loss_by_samples(
    func: Loss,
    calls: Sequence[dict[str, Any]],
    weights: Sequence[Weight],
    owners: Tensor,
    size: int,
    choose: Choose | None,
) -> Tensor:
    """The weighted sum of a loss for several targets, over the chosen samples.

    With weights ``u_i`` a mean ``sum_i(l_i) / n`` becomes ``sum_i(u_i * l_i) / n``, whatever it divides by (class
    weights, entries that are not ignored); over chosen samples it is the loss of a batch of these alone.

    Args:
        func: One of torch's losses.
        calls: Its arguments for each target, with a ``reduction``.
        weights: Of each target.
        owners: The sample that each entry along the first dimension belongs to.
        size: Number of samples, B.
        choose: Chooses by the loss of each sample.

    Returns:
        The loss, a scalar.
    """
    weights, factor = [_by_entry(weight, owners) for weight in weights], 1.0
    if choose is not None:
        elements = [func(**{**call, "reduction": "none"}) for call in calls]
        chosen = choose(_per_sample(weighted_sum(elements, weights), owners, size, _counted(calls[0])))
        if chosen is not None:
            kept, factor = chosen
            entries = entries_of(kept, owners)
            calls = [_narrowed(call, entries) for call in calls]
            weights = [weight[entries] if isinstance(weight, Tensor) else weight for weight in weights]
    total = torch.stack([_weighted(func, call, weight) for call, weight in zip(calls, weights, strict=True)]).sum()
    return total if factor == 1.0 else total * factor


def values_by_samples(
    values: Sequence[Tensor], weights: Sequence[Weight], owners: Tensor, size: int, choose: Choose | None
) -> tuple[Tensor, float]:
    """The weighted sum of values for several targets, at the entries of the chosen samples, and a factor."""
    mixed = weighted_sum(values, [_by_entry(weight, owners) for weight in weights])
    chosen = None if choose is None else choose(_per_sample(mixed, owners, size, None))
    if chosen is None:
        return mixed, 1.0
    return mixed[entries_of(chosen[0], owners)], chosen[1]


def weighted_sum(values: Sequence[Tensor], weights: Sequence[Weight]) -> Tensor:
    """Sum of the values times their weights, one number each or one for each entry of the first dimension."""
    terms = [_shaped(weight, value) * value for value, weight in zip(values, weights, strict=True)]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def entries_of(samples: Tensor, owners: Tensor) -> Tensor:
    """Positions of the entries that belong to the samples."""
    return torch.isin(owners, samples).nonzero().flatten()


def _by_entry(weight: Weight, owners: Tensor) -> Weight:
    return weight[owners] if isinstance(weight, Tensor) else weight


def _shaped(weight: Weight, value: Tensor) -> Weight:
    return weight.to(value.dtype).view(-1, *[1] * (value.ndim - 1)) if isinstance(weight, Tensor) else weight


def _per_sample(values: Tensor, owners: Tensor, size: int, counted: Tensor | None) -> Tensor:
    """The mean of each sample's values, those that are ignored left out; -inf for a sample without any."""
    values = values.detach().reshape(len(values), -1)
    counts = values.new_ones(values.shape) if counted is None else counted.reshape(len(values), -1).to(values.dtype)
    total, count = (values.new_zeros(size).index_add(0, owners, each.sum(1)) for each in (values, counts))
    return torch.where(count > 0, total / count, -torch.inf)


def _counted(call: dict[str, Any]) -> Tensor | None:
    target = call["target"]
    return None if "ignore_index" not in call or target.is_floating_point() else target != call["ignore_index"]


def _narrowed(call: dict[str, Any], entries: Tensor) -> dict[str, Any]:
    """The same call for some entries: of the target, and of all that have the dimensions of the first argument."""
    first = next(iter(call.values()))
    return {
        name: value[entries]
        if isinstance(value, Tensor)
        and (name == "target" or (value.ndim == first.ndim and name != "pos_weight"))
        and len(value) == len(first)
        else value
        for name, value in call.items()
    }


def _weighted(func: Loss, call: dict[str, Any], weight: Weight) -> Tensor:
    if not isinstance(weight, Tensor):
        loss = func(**call)
        return loss if weight == 1.0 else weight * loss
    elements = func(**{**call, "reduction": "none"})
    total = (elements * _shaped(weight, elements)).sum()
    if call["reduction"] == "sum":
        return total
    mean = func(**call).detach()
    return total * torch.where(mean == 0, 1.0, mean / elements.detach().sum())  # a mean is a sum over something
