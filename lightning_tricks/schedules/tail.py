"""A schedule with a constant learning rate at its end, for averaging the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_tricks.core.lightning.fit import Place
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.schedules import curves
from lightning_tricks.schedules.arguments import ROUNDING, Duration, check_settings, whole_steps
from lightning_tricks.schedules.planned import Schedule, in_dictionary
from lightning_tricks.schedules.scheduler import Curve, CurveLR, base_lr, settings_of

__all__ = ["swa_tail"]


def swa_tail(schedule: Schedule, *, start: Duration = 0.75, swa_lr: float, anneal: Duration = 0) -> Schedule:
    """Another schedule up to step S, then a constant learning rate for averaging the weights.

    ``f(t) = level + (curve(S) - level) (1+cos(pi p))/2``, ``p = (t-S)/A`` from S on, ``level = swa_lr / base``

    Args:
        schedule: The dictionary that another factory returned.
        start: S, when the tail begins (int steps, float fraction of training), after the warm-up.
        swa_lr: Learning rate of the first parameter group in the tail; the others keep their ratio to it.
        anneal: A, length of the way from the curve to ``swa_lr`` (int steps, float fraction).

    Raises:
        TypeError: For anything but the dictionary of another curve's factory.
        ValueError: If a length or the learning rate is out of range, or the tail starts in the warm-up.
        UnknownTotalSteps: For a fraction, if T was not needed for the schedule (constant, inverse_sqrt).

    Example:
        >>> import torch
        >>> from lightning_tricks.schedules import cosine_restarts
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> schedule = swa_tail(cosine_restarts(optimizer, total_steps=100), start=0.75, swa_lr=0.05)
        >>> schedule["lr_scheduler"]["scheduler"].curve(80)
        0.5

    References:
        Izmailov et al., arXiv 1803.05407.
    """
    config = schedule.get("lr_scheduler") if isinstance(schedule, dict) else None
    scheduler = config.get("scheduler") if isinstance(config, dict) else None
    if not isinstance(scheduler, CurveLR) or "total_steps" not in scheduler.settings:
        raise TypeError(f"swa_tail goes after what another curve's factory returned, got {schedule!r}.")
    check_settings({"start": start, "swa_lr": swa_lr, "anneal": anneal})
    base = float(base_lr(scheduler.optimizer.param_groups[0]))
    if not base:
        raise ValueError("swa_lr is relative to the first parameter group's learning rate, which must not be 0, got 0.")
    tail = partial(_tail, start=start, anneal=anneal, level=float(swa_lr) / base)
    tailed = CurveLR(scheduler.optimizer, tail(scheduler.curve, Place()), momentum=scheduler.momentum)
    if scheduler.rebind is not None:
        tailed.rebind, tailed.follows = partial(_rebound_tail, scheduler.rebind, tail), scheduler.follows
    tailed.occasion = scheduler.occasion
    of = scheduler.settings if scheduler.arguments is None else scheduler.arguments
    tailed.arguments = {"curve": "swa_tail", "start": start, "swa_lr": swa_lr, "anneal": anneal, "of": of}
    scheduler.replaced = True
    return in_dictionary(tailed)


def _tail(curve: Curve, place: Place, *, start: Duration, anneal: Duration, level: float) -> Curve:
    """A curve with a constant tail from ``start`` on."""
    settings = settings_of(curve)
    total, warmup = settings["total_steps"], settings.get("warmup", 0)
    if total is None and (isinstance(start, float) or (isinstance(anneal, float) and anneal)):
        raise UnknownTotalSteps(
            f"swa_tail(start={start!r}, anneal={anneal!r}) is a fraction of a total that {settings['curve']}"
            " did not need: give ints, or tell it"
        )
    first, length = whole_steps(start, total or 1, place), whole_steps(anneal, total or 1)
    if first < warmup:
        raise ValueError(
            f"start must not lie in the warmup, which ends at step {warmup:g}, got {start!r} (step {first:g}):"
            " start later or shorten the warmup."
        )
    if total is not None and first + length > total + ROUNDING:
        raise ValueError(
            f"start and anneal must end by total_steps={total}, got {start!r} and {anneal!r} (step {first + length:g}):"
            " start earlier or anneal for fewer steps."
        )
    return partial(curves.swa_tail, curve=curve, start=first, level=level, anneal=length)


def _rebound_tail(
    rebind: Callable[[Place], tuple[Curve, Curve | None]], tail: Callable[[Curve, Place], Curve], place: Place
) -> tuple[Curve, Curve | None]:
    curve, momentum = rebind(place)
    return tail(curve, place), momentum
