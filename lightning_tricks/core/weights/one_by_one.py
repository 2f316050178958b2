"""Optimizers that are stepped one weight at a time, and the proof that this is the same as all weights together."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_tricks.core.random_numbers import random_numbers_from


def step_weight(optimizer: Optimizer, group: dict[str, Any], weight: Tensor) -> None:
    """Step one weight by its gradient, and free the gradient.

    What the optimizer writes into the group, such as a count of steps, is dropped: it belongs to the step of all.

    Args:
        optimizer: The optimizer of the weight.
        group: The weight's group in ``optimizer.param_groups``.
        weight: A weight with a gradient.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [weight]}]
    try:
        _bare_step(optimizer)()
    finally:
        optimizer.param_groups = groups
    weight.grad = None
    increment_version(weight)  # not every library's kernels do; torch then refuses to use the value it had before


def _bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's step without the hooks and the count that belong to the step of all weights."""
    step = type(optimizer).step
    return partial(step.__wrapped__ if hasattr(step, "hooked") else step, optimizer)  # type: ignore[attr-defined]


def require_weight_by_weight(optimizer: Optimizer) -> None:
    """Raise unless an optimizer does the same weight by weight, as a trial on small weights shows.

    An optimizer of the same class and groups steps two small weights a group, together and one by one, three times.
    All weights and states must be equal. The last gradient of a weight is infinite, so that any limit on a norm of all
    gradients shows.

    Raises:
        MisconfigurationException: If it does not, or cannot be tried.

    Example:
        >>> require_weight_by_weight(torch.optim.AdamW([torch.ones(4)]))
    """
    kind = type(optimizer).__name__
    remedy = "Use another optimizer, such as AdamW, or remove StepInBackward."
    try:
        together, singly = _seeded_trial(optimizer, singly=False), _seeded_trial(optimizer, singly=True)
    except Exception as error:  # whatever the optimizer's own code raises
        raise MisconfigurationException(
            f"StepInBackward tries an optimizer on small weights, which {kind} does not allow"
            f" ({type(error).__name__}: {error}). {remedy}"
        ) from error
    if not _same(together, singly):
        raise MisconfigurationException(
            f"StepInBackward steps one weight at a time, which for {kind} is not the same as all of them together."
            f" {remedy}"
        )


def _seeded_trial(optimizer: Optimizer, *, singly: bool) -> Any:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    with random_numbers_from(0, weights[0].device):  # an optimizer may draw some, too
        return _trial(optimizer, singly=singly)


def _trial(optimizer: Optimizer, *, singly: bool) -> Any:
    """The weights and the states of a small optimizer after three steps."""
    groups = [{**_settings(group), "params": _small(group["params"])} for group in optimizer.param_groups]
    small = type(optimizer)([group for group in groups if group["params"]])  # type: ignore[call-arg]
    given, own = _attributes(optimizer), _attributes(small)
    if unlike := [name for name in given if name[0] != "_" and given[name] != own.get(name)]:
        raise ValueError(f"its groups do not hold {', '.join(unlike)}")
    if _by_position(optimizer):
        raise ValueError("it has settings for single weights")

    def closure(number: int) -> Tensor:
        for group in small.param_groups[::-1]:
            for place, weight in reversed([*enumerate(group["params"])]):
                weight.grad = torch.randn(weight.shape, device=weight.device).to(weight.dtype)
                if number == 2 and place:
                    weight.grad.fill_(torch.inf)
                if singly:
                    step_weight(small, group, weight)
        return torch.zeros((), device=small.param_groups[0]["params"][0].device)

    for number in range(3):
        _bare_step(small)(partial(closure, number))
    return [[group["params"] for group in small.param_groups], small.state_dict(), _attributes(small)]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}


def _small(weights: list[Tensor]) -> list[Tensor]:
    """Two weights like the first and the last of a group that can train, with at most eight entries in a dimension."""
    numbers = [weight for weight in weights if weight.is_floating_point() or weight.is_complex()]
    return [
        torch.randn([min(size, 8) for size in weight.shape], device=weight.device).to(weight.dtype).requires_grad_()
        for weight in (numbers[:1] + numbers[-1:])
    ]


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer holds beside its groups and states, such as a setting or a count."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}


def _by_position(optimizer: Any) -> bool:
    """Whether bitsandbytes has settings for weights by their positions in the groups."""
    manager = getattr(optimizer, "mng", None)
    return bool(manager and (manager.index2config or manager.module_weight_config_triple))


def _same(one: Any, other: Any) -> bool:
    """Whether two trees of tensors, numbers and objects are equal bit for bit; NaN equals NaN."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is type(other) and hasattr(one, "__dict__"):  # GaLore has an object for each projection
        return _same(vars(one), vars(other))
    return bool(one == other or one != one)
