"""A picture of a schedule, before anything is trained with it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_tricks.core.checks import check_choice, check_count
from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.schedules.factories import CURVES

__all__ = ["plot_schedule"]

_LEGEND = 10  # the most lines that a legend names: nobody tells more apart


def plot_schedule(
    schedule: str | Callable[..., Any] | Mapping[str, Any] | LRScheduler,
    steps: int | None = None,
    ax: Axes | None = None,
) -> tuple[Figure, Axes]:
    """Draw the learning rate of each parameter group at every step, and the momentum if it is cycled.

    Nothing is trained: a copy of the scheduler is stepped, and the schedule, its optimizer and the weights stay as they
    are. A factory is drawn for a base learning rate of 1. A scheduler that has been stepped is drawn from there on.

    Args:
        schedule: The name of a curve ("cosine"), with its own defaults; a factory, also bound by ``functools.partial``,
            or any function of an optimizer; the dictionary that a factory returns; or any torch LRScheduler.
        steps: Number of steps to draw, also the ``total_steps`` of a factory that needs them; by default all that are
            left.
        ax: The axes to draw into, in place of a new figure's. The momentum has an axis on the right.

    Raises:
        TypeError: For anything else, and for a ReduceLROnPlateau, which depends on what is trained.
        ValueError: If no curve has the name, or the number of steps is not given and cannot be known.
        ImportError: If matplotlib is missing.

    Example:
        >>> from functools import partial
        >>> from lightning_tricks.schedules import cosine
        >>> figure, ax = plot_schedule(partial(cosine, warmup=0.1), steps=100)
        >>> rates = ax.lines[0].get_ydata()
        >>> float(rates[0]), float(rates[9]), len(rates)
        (0.1, 1.0, 100)
    """
    check_count("steps", steps, optional=True)
    if isinstance(schedule, str):
        check_choice("schedule", schedule, CURVES)
        schedule = CURVES[schedule]
    scheduler = _scheduler_of(_made(schedule, steps) if callable(schedule) else schedule)
    start = getattr(scheduler, "last_epoch", 0)  # a ChainedScheduler has none
    rates, momenta = curves_of(scheduler, _steps_left(scheduler, start) if steps is None else steps)
    figure, ax = figure_and_axes(ax)
    names = [str(group.get("name", f"group {i}")) for i, group in enumerate(scheduler.optimizer.param_groups)]
    _draw(ax, start, rates, names, "learning rate / base" if callable(schedule) else "learning rate")
    if any(len(set(momentum)) > 1 for momentum in momenta):
        _draw(ax.twinx(), start, momenta, [f"momentum, {name}" for name in names], "momentum", linestyle="--")
    ax.set(xlabel="step")
    return figure, ax


def curves_of(scheduler: LRScheduler, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """The learning rates of each group in the next ``steps`` steps, and its momenta, if it has any.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
    >>> curves_of(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5), steps=3)
    ([[1.0, 0.5, 0.25]], [[0.9, 0.9, 0.9]])
    """
    copied = _without_weights(scheduler)
    groups = copied.optimizer.param_groups
    rates: list[list[float]] = [[] for _ in groups]
    momenta: list[list[float]] = [[] for _ in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped, which it never does here
        for step in range(steps):
            if step:
                copied.step()
            for group, its_rates, its_momenta in zip(groups, rates, momenta, strict=True):
                its_rates.append(float(group["lr"]))
                momentum = group["betas"][0] if "betas" in group else group.get("momentum")
                its_momenta.extend([] if momentum is None else [float(momentum)])
    return rates, momenta


def _made(factory: Callable[..., Any], steps: int | None) -> Any:
    def optimizer() -> Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=0.9)

    try:
        return factory(optimizer())
    except UnknownTotalSteps as error:
        if steps is None:
            raise ValueError(f"The length of the schedule is unknown ({error.reason}): pass steps=...") from error
        return factory(optimizer(), total_steps=steps)


def _scheduler_of(schedule: Any) -> LRScheduler:
    found = schedule
    for name in ("lr_scheduler", "scheduler"):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
    if isinstance(found, ReduceLROnPlateau):
        raise TypeError(f"schedule must not depend on a metric, which only training gives; got {type(found).__name__}.")
    if not isinstance(found, LRScheduler):
        raise TypeError(f"schedule must be a factory, what one returns, or a torch LRScheduler, got {schedule!r:.80}.")
    return found


def _steps_left(scheduler: LRScheduler, start: int) -> int:
    settings = getattr(scheduler, "settings", {})  # of a CurveLR; a tail has those of the curve before it inside
    while "total_steps" not in settings and "of" in settings:
        settings = settings["of"]
    total = settings.get("total_steps", getattr(scheduler, "total_steps", None))
    if total is None:
        raise ValueError(f"A {type(scheduler).__name__} does not tell how long it is: pass steps=...")
    return max(1, total - start)


def _without_weights(scheduler: LRScheduler) -> LRScheduler:
    """A copy with an optimizer of its own whose parameters are empty, since a large model may not fit twice."""
    optimizer = scheduler.optimizer
    stand_ins: dict[int, Any] = {id(weight): nn.Parameter(torch.zeros(())) for weight in weights_of(optimizer)}
    return deepcopy(scheduler, {**stand_ins, id(optimizer.state): defaultdict(dict)})


def _draw(
    ax: Axes, start: int, curves: Sequence[Sequence[float]], names: Sequence[str], ylabel: str, linestyle: str = "-"
) -> None:
    for curve, name in zip(curves, names, strict=True):
        ax.plot(range(start, start + len(curve)), curve, linestyle, label=name)
    ax.set(ylabel=ylabel)
    if 1 < len(curves) <= _LEGEND:
        ax.legend()
