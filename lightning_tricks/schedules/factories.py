"""Schedules for ``configure_optimizers``: a warm-up, then a curve over the optimizer steps that training takes.

Every factory returns the dictionary that Lightning expects, ``{"optimizer": ..., "lr_scheduler": {"scheduler": ...,
"interval": "step", "frequency": 1}}``, and takes these arguments:

- ``optimizer``: after t optimizer steps the learning rate of each parameter group is its base learning rate (see
  ``CurveLR``) times ``f(t)``.
- ``module``: the LightningModule, ``self`` in ``configure_optimizers``. T, the number of optimizer steps of its fit, is
  counted from its Trainer (see ``optimizer_steps``).
- ``total_steps``: T, for a fit whose steps cannot be counted, as in manual optimization.
- ``warmup``: W, the length of the linear warm-up, in which ``f(t) = min(1, (t+1)/W)``.
- ``floor``: the lowest factor, which curves that end have from T on.

Lengths are durations: an int counts optimizer steps, a float in [0, 1] is a fraction of T. Under ``fast_dev_run`` and
``overfit_batches``, lengths in steps that were chosen for the full training end with the trial.

A fit that is begun again after an interruption, or resumed, is at step t of its present plan: the planned steps before
the position where it began, and those taken since. With other devices, accumulation or batch sizes a curve goes on
where it was, and it always ends where training ends. With a larger ``max_epochs`` it goes on in the curve of the longer
plan, whose factor is higher there. Lengths in steps that were taken in the earlier plan are stretched with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch.optim import Optimizer

from lightning_tricks.core.fit_start import announce
from lightning_tricks.core.lightning.fit import Place
from lightning_tricks.core.lightning.optimizer_groups import is_schedule_free
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.core.lightning.trainer import trainer_of
from lightning_tricks.schedules import curves
from lightning_tricks.schedules.arguments import (
    ROUNDING,
    Duration,
    check_arguments,
    check_settings,
    count_steps,
    in_steps,
    whole_steps,
)
from lightning_tricks.schedules.scheduler import Curve, CurveLR, base_lr, settings_of

__all__ = [
    "constant",
    "cosine",
    "cosine_restarts",
    "flat_cos",
    "inverse_sqrt",
    "linear",
    "one_cycle",
    "polynomial",
    "step_decay",
    "swa_tail",
    "wsd",
]

Schedule = OptimizerLRSchedulerConfig


def constant(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then the base learning rate: ``f(t) = min(1, (t+1)/W)``.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer; needed only if ``warmup`` is a fraction.
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        floor: No effect, since a constant curve never decays; here so that all curves take the same arguments.

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If ``warmup`` is a fraction and T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> constant(optimizer, warmup=4)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.025]
    """
    return _schedule(curves.constant, optimizer, module, total_steps, endless=True, warmup=warmup, floor=floor)


def linear(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then a straight line to the floor: ``f(t) = floor + (1-floor) (1-p)``, ``p = (t-W)/(T-W)``.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> linear(optimizer, total_steps=10)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.1]
    """
    return _schedule(curves.linear, optimizer, module, total_steps, warmup=warmup, floor=floor)


def cosine(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then half a cosine to the floor: ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-W)/(T-W)``.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> cosine(optimizer, total_steps=10, warmup=0.2)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.05]

    References:
        Loshchilov and Hutter, SGDR, arXiv 1608.03983.
    """
    return _schedule(curves.cosine, optimizer, module, total_steps, warmup=warmup, floor=floor)


def polynomial(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    power: float = 0.9,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then a power of what is left: ``f(t) = floor + (1-floor) (1-p)**power``, ``p = (t-W)/(T-W)``.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        power: Exponent of the decay, at least 0; 1 is a straight line.
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> polynomial(optimizer, total_steps=10, warmup=2)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.05]
    """
    return _schedule(curves.polynomial, optimizer, module, total_steps, warmup=warmup, power=power, floor=floor)


def inverse_sqrt(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then the inverse square root of the step: ``f(t) = max(floor, sqrt(W/(t+1)))``.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer; needed only if ``warmup`` is a fraction.
        total_steps: T, the number of optimizer steps, instead of counting it; the curve itself has no end.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        floor: Lowest factor, in [0, 1].

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If ``warmup`` is a fraction and T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> inverse_sqrt(optimizer, warmup=4)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.025]

    References:
        Vaswani et al., Attention Is All You Need, arXiv 1706.03762.
    """
    return _schedule(curves.inverse_sqrt, optimizer, module, total_steps, endless=True, warmup=warmup, floor=floor)


def step_decay(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    milestones: Sequence[Duration] = (0.5, 0.75),
    gamma: float = 0.1,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then a decay by ``gamma`` at each milestone: ``f(t) = max(floor, gamma**n)`` after n of them.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        milestones: When the learning rate decays, in order (int steps, float fractions of training).
        gamma: Factor of each decay, in [0, 1].
        floor: Lowest factor, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> step_decay(optimizer, total_steps=10, milestones=[0.5])["lr_scheduler"]["scheduler"].get_last_lr()
        [0.1]
    """
    settings: dict[str, Any] = {"warmup": warmup, "milestones": milestones, "gamma": gamma, "floor": floor}
    return _schedule(curves.step_decay, optimizer, module, total_steps, **settings)


def flat_cos(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    flat: Duration = 0.75,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, flat at the base learning rate, then half a cosine to the floor.

    ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-F)/(T-F)``

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        flat: F, when the cosine begins (int steps, float fraction of training), at least W.
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> flat_cos(optimizer, total_steps=100, warmup=4)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.025]

    References:
        ``fit_flat_cos`` of fastai.
    """
    return _schedule(curves.flat_cos, optimizer, module, total_steps, warmup=warmup, flat=flat, floor=floor)


def one_cycle(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0.3,
    initial: float = 0.04,
    floor: float = 4e-6,
    momentum: tuple[float, float] | None = None,
) -> Schedule:
    """Up by half a cosine from ``initial`` to the base learning rate, then down to the floor (torch's OneCycleLR).

    ``f(t) = initial + (1-initial) (1-cos(pi t/(W-1)))/2`` up to step W-1, then
    ``f(t) = floor + (1-floor) (1+cos(pi p))/2`` with ``p = (t-W+1)/(T-W)``. The optimizer's learning rate is the
    highest one of the cycle.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the way up (int steps, float fraction); ``pct_start`` of torch.
        initial: Factor of the first step, in [0, 1]; ``1/div_factor`` of torch.
        floor: Factor of the last step and after, in [0, 1]; ``1/(div_factor*final_div_factor)`` of torch.
        momentum: Lowest and highest momentum or first beta, in [0, 1), for example (0.85, 0.95): it goes down while the
            learning rate goes up, and back. None leaves it alone.

    Raises:
        ValueError: If a length or another value is out of range, or an optimizer has no momentum to cycle.
        UnknownTotalSteps: If T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> one_cycle(optimizer, total_steps=10)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.004]

    References:
        Smith and Topin, Super-Convergence, arXiv 1708.07120.
    """
    settings: dict[str, Any] = {"warmup": warmup, "initial": initial, "floor": floor}
    return _schedule(curves.one_cycle, optimizer, module, total_steps, momentum=momentum, **settings)


def wsd(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    cooldown: Duration = 0.2,
    shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt",
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, stable, decay: flat at the base learning rate until the last C steps, then down to the floor.

    ``f(t) = floor + (1-floor) g(p)``, ``p = (t-T+C)/C``

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        cooldown: C, length of the decay (int steps, float fraction), at most T-W.
        shape: ``g(p)``: "1-sqrt" for ``1-sqrt(p)``, "linear" for ``1-p``, "cosine" for ``(1+cos(pi p))/2``.
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> wsd(optimizer, total_steps=100, warmup=4)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.025]

    References:
        Haegele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, arXiv 2405.18392.
    """
    settings: dict[str, Any] = {"warmup": warmup, "cooldown": cooldown, "shape": shape, "floor": floor}
    return _schedule(curves.wsd, optimizer, module, total_steps, **settings)


def cosine_restarts(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    cycles: int = 3,
    growth: float = 1.0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then cosines to the floor one after the other, each starting at the base learning rate.

    ``f(t) = floor + (1-floor) (1+cos(pi p))/2`` with p the progress within the cycle

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        cycles: Number of cosines, at least 1.
        growth: Ratio of the length of a cosine to that of the one before it, at least 1.
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If T is not given and cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> cosine_restarts(optimizer, total_steps=10, warmup=2)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.05]

    References:
        Loshchilov and Hutter, SGDR, arXiv 1608.03983.
    """
    settings: dict[str, Any] = {"warmup": warmup, "cycles": cycles, "growth": growth, "floor": floor}
    return _schedule(curves.cosine_restarts, optimizer, module, total_steps, **settings)


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
    return _dictionary(tailed)


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


# -- schedulers -------------------------------------------------------------------------------------------------------


def announce_schedule(module: L.LightningModule | None) -> None:
    """Let the fit that a module is in know of a schedule."""
    if (trainer := trainer_of(module)) is not None:
        announce(trainer)


def _schedule(
    curve: Callable[..., float],
    optimizer: Optimizer,
    module: L.LightningModule | None,
    total_steps: int | None,
    *,
    momentum: tuple[float, float] | None = None,
    endless: bool = False,
    **settings: Any,
) -> Schedule:
    """Make the dictionary of a factory; T is left unknown where an endless curve does not need it."""
    check_arguments(optimizer, module)
    if is_schedule_free(optimizer):
        raise ValueError(
            f"optimizer: a schedule-free optimizer takes no schedule, got {type(optimizer).__name__}: return it alone,"
            " and add the callback ScheduleFree()."
        )
    optional = {"total_steps": total_steps, "momentum": momentum}
    check_settings({**settings, **{name: value for name, value in optional.items() if value is not None}})
    endless = endless and total_steps is None and isinstance(settings["warmup"], int)
    counts, trainer = total_steps is None, trainer_of(module)
    bind = partial(_bound, curve, settings, momentum, endless)
    total = max(1, settings["warmup"]) if endless else total_steps or count_steps(module, curve.__name__)
    # The plan of a checkpoint, in which there may have been more steps, is known when the fit begins.
    resumes = trainer is not None and bool(trainer.ckpt_path)
    bound, cycled = bind(Place(total=total), is_trial=counts and (resumes or _is_trial(trainer)))
    announce_schedule(module)
    scheduler = CurveLR(optimizer, bound, momentum=cycled)
    scheduler.rebind = partial(bind, is_trial=counts and _is_trial(trainer))
    scheduler.follows = counts and trainer is not None
    scheduler.occasion = ("step", 1) if scheduler.follows else None
    scheduler.arguments = {"curve": curve.__name__, **optional, **settings}
    return _dictionary(scheduler)


def _bound(
    curve: Callable[..., float],
    settings: dict[str, Any],
    momentum: tuple[float, float] | None,
    endless: bool,
    place: Place,
    *,
    is_trial: bool,
) -> tuple[Curve, Curve | None]:
    """A curve, and that of the momentum, with lengths in steps of the plan."""
    if endless:
        place = place._replace(total=max(1, math.ceil(place.planned(settings["warmup"]))))
    steps = in_steps(settings, place, is_trial)
    cycled = None
    if momentum is not None:
        low, high = map(float, momentum)
        cycled = partial(curves.one_cycle_momentum, total_steps=place.total, warmup=steps["warmup"], low=low, high=high)
    return partial(curve, total_steps=None if endless else place.total, **steps), cycled


def _is_trial(trainer: L.Trainer | None) -> bool:
    """Whether a fit is a trial of the training that durations in steps were chosen for."""
    return trainer is not None and bool(trainer.fast_dev_run or trainer.overfit_batches > 0)  # type: ignore[attr-defined]


def _dictionary(scheduler: CurveLR) -> Schedule:
    """The dictionary for ``configure_optimizers`` of a scheduler that steps with the optimizer."""
    config: LRSchedulerConfigType = {"scheduler": scheduler, "interval": "step", "frequency": 1}
    return {"optimizer": scheduler.optimizer, "lr_scheduler": config}
