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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch.optim import Optimizer

from lightning_tricks.core.checks import (
    MOST,
    check_choice,
    check_count,
    check_duration,
    check_range,
    check_type,
    duration_steps,
)
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.optimizer_groups import is_schedule_free
from lightning_tricks.core.lightning.steps import UnknownTotalSteps, optimizer_steps
from lightning_tricks.core.lightning.trainer import trainer_of
from lightning_tricks.core.trick import announce
from lightning_tricks.schedules import curves
from lightning_tricks.schedules.scheduler import CurveLR, base_lr

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
Duration = int | float  # optimizer steps, or a fraction of training


def constant(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
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
        floor: No effect, since a constant curve never falls; here so that all curves take the same arguments.

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
    module: pl.LightningModule | None = None,
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
        >>> sorted(linear(optimizer, total_steps=10)["lr_scheduler"])
        ['frequency', 'interval', 'scheduler']
    """
    return _schedule(curves.linear, optimizer, module, total_steps, warmup=warmup, floor=floor)


def cosine(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
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
    module: pl.LightningModule | None = None,
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
        power: Exponent of the fall, at least 0; 1 is a straight line.
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
    module: pl.LightningModule | None = None,
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
    module: pl.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    milestones: Sequence[Duration] = (0.5, 0.75),
    gamma: float = 0.1,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then a fall by ``gamma`` at each milestone: ``f(t) = max(floor, gamma**n)`` after n of them.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        milestones: When the learning rate falls, in order (int steps, float fractions of training).
        gamma: Factor of each fall, in [0, 1].
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
    module: pl.LightningModule | None = None,
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
    module: pl.LightningModule | None = None,
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
    module: pl.LightningModule | None = None,
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
        cooldown: C, length of the fall (int steps, float fraction), at most T-W.
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
    module: pl.LightningModule | None = None,
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
        raise TypeError(f"swa_tail goes behind what another curve's factory returned, got {schedule!r}.")
    check_settings({"start": start, "swa_lr": swa_lr, "anneal": anneal})
    total, warmup = scheduler.settings["total_steps"], scheduler.settings.get("warmup", 0)
    if total is None and (isinstance(start, float) or (isinstance(anneal, float) and anneal)):
        raise UnknownTotalSteps(
            f"swa_tail(start={start!r}, anneal={anneal!r}) is a fraction of a total that {scheduler.settings['curve']}"
            " did not need: give ints, or tell it"
        )
    first, length = whole_steps(start, total or 1), whole_steps(anneal, total or 1)
    if first < warmup:
        raise ValueError(
            f"start must not lie in the warmup, which ends at step {warmup:g}, got {start!r} (step {first:g}):"
            " start later or shorten the warmup."
        )
    if total is not None and first + length > total + _ROUNDING:
        raise ValueError(
            f"start and anneal must end by total_steps={total}, got {start!r} and {anneal!r} (step {first + length:g}):"
            " start earlier or anneal for fewer steps."
        )
    base = float(base_lr(scheduler.optimizer.param_groups[0]))
    if not base:
        raise ValueError("swa_lr is relative to the first parameter group's learning rate, which must not be 0, got 0.")
    curve = partial(curves.swa_tail, curve=scheduler.curve, start=first, level=float(swa_lr) / base, anneal=length)
    tailed = CurveLR(scheduler.optimizer, curve, momentum=scheduler.momentum)
    scheduler.replaced = True
    return _dictionary(tailed)


# -- arguments --------------------------------------------------------------------------------------------------------


def _check_milestones(name: str, milestones: Sequence[Duration]) -> None:
    if isinstance(milestones, str | bytes) or not isinstance(milestones, Sequence):
        raise TypeError(f"{name} must be a list of ints (steps) and floats (fractions), got {milestones!r}.")
    for milestone in milestones:
        check_duration(name, milestone)


def _check_momentum(name: str, pair: tuple[float, float]) -> None:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(f"{name} must be two numbers, lowest and highest, for example (0.85, 0.95), got {pair!r}.")
    for momentum in pair:
        check_range(name, momentum, 0.0, 1.0, below=True)
    if pair[0] > pair[1]:
        raise ValueError(f"{name} must have the lowest first and the highest second, got {pair!r}: swap them.")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "total_steps": check_count,
    **dict.fromkeys(("warmup", "flat", "cooldown", "start", "anneal"), check_duration),
    "milestones": _check_milestones,
    "momentum": _check_momentum,
    **dict.fromkeys(("floor", "gamma", "initial"), partial(check_range, low=0.0, high=1.0)),
    "factor": partial(check_range, low=0.0, high=1.0, below=True),
    **dict.fromkeys(("power", "swa_lr", "threshold"), partial(check_range, low=0.0)),
    "cycles": check_count,
    "growth": partial(check_range, low=1.0),
    "patience": partial(check_count, least=0),
    "shape": partial(check_choice, allowed=curves.COOLDOWNS),
    "mode": partial(check_choice, allowed=("min", "max")),
    "monitor": lambda name, value: check_type(name, value, str),
}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise for an argument of a factory, given by its name, that is out of range by itself."""
    for name, value in settings.items():
        _CHECKS[name](name, value)
    cycles, growth = settings.get("cycles", 1), settings.get("growth", 1.0)
    if cycles > 1000 or cycles * math.log(growth) > 700:  # exp(710) is too large for a float
        raise ValueError(
            f"cycles must be at most 1000, and growth**cycles a number, got cycles={cycles}, growth={growth}."
        )


def check_arguments(optimizer: Optimizer, module: pl.LightningModule | None) -> None:
    """Raise unless they are an optimizer and a module, in this order."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer (module comes second), got {optimizer!r}.")
    require_same_lightning(module, "A schedule")
    if module is not None and not isinstance(module, pl.LightningModule):
        raise TypeError(f"module must be a LightningModule, got {type(module).__name__}.")


# -- durations --------------------------------------------------------------------------------------------------------

_ROUNDING = 1e-9  # steps; as floats, 0.2 and 0.8 of 3 steps are together more than 3
# What each duration of a curve must do, and the fewest and the most steps that it may take, given T and W.
_PHASES: dict[str, tuple[str, Callable[[float, float], tuple[float, float]]]] = {
    "warmup": ("be at most total_steps", lambda T, W: (0.0, T)),
    "flat": ("lie between the end of the warmup and total_steps", lambda T, W: (W, T)),
    "cooldown": ("fit between the end of the warmup and total_steps", lambda T, W: (0.0, T - W)),
    "milestones": ("come in order, after the end of the warmup", lambda T, W: (W, math.inf)),
}


def whole_steps(duration: Duration, total_steps: int) -> float:
    """The steps of a duration: 0.28 of 25 is 7, which floats make 7.000000000000001 and so the eighth step."""
    steps = duration_steps(min(duration, MOST), total_steps)  # an int may be too large for a float
    return float(round(steps) if abs(steps - round(steps)) < _ROUNDING else steps)


def _in_steps(settings: Mapping[str, Any], total_steps: int, is_trial: bool) -> dict[str, Any]:
    """The settings of a curve with its durations in steps.

    Args:
        settings: Settings of a curve, a warm-up among them, checked by ``check_settings``.
        total_steps: T, the number of optimizer steps.
        is_trial: Whether durations given in steps may be longer than training, and end with it.

    Raises:
        ValueError: If the phases of the curve do not follow each other within T.
    """
    steps = {name: float(value) if isinstance(value, float) else value for name, value in settings.items()}  # no NumPy
    phases = {name: settings[name] for name in _PHASES if name in settings}
    durations = {name: [value] if isinstance(value, int | float) else value for name, value in phases.items()}
    shorten = is_trial and any(isinstance(duration, int) and duration for duration in chain(*durations.values()))
    for name, given in phases.items():
        rule, limits = _PHASES[name]
        least, most = limits(total_steps, steps["warmup"])
        lengths = [whole_steps(duration, total_steps) for duration in durations[name]]
        if shorten:
            lengths = [min(max(length, least), most, total_steps) for length in lengths]
        if any(after < before - _ROUNDING for before, after in pairwise([least, *lengths, most])):
            found = f"{', '.join(f'{length:g}' for length in lengths)} of {total_steps} steps"
            remedy = "" if name == "warmup" else f", which takes {steps['warmup']:g} steps, or change {name}"
            raise ValueError(f"{name} must {rule}, got {given!r} ({found}): shorten the warmup{remedy}.")
        steps[name] = tuple(lengths) if name == "milestones" else lengths[0]
    return steps


def count_steps(module: pl.LightningModule | None, schedule: str) -> int:
    """The number of optimizer steps of the fit that a module is in.

    Args:
        module: The module, if one was given.
        schedule: The name of the factory that needs the number, for the error message.

    Raises:
        UnknownTotalSteps: If it cannot be counted.
    """
    needs = f"{schedule} needs the number of optimizer steps"
    if module is None:
        raise UnknownTotalSteps(f"{needs}, and neither module nor total_steps was given: pass the module (self)")
    needs += f" of {type(module).__name__}"
    trainer = trainer_of(module)
    if trainer is None:
        raise UnknownTotalSteps(f"{needs}, which has no Trainer yet (call this in configure_optimizers)")
    # a Trainer that fits a second time goes on counting, but this schedule starts anew; a resumed one is restored
    taken = 0 if trainer.ckpt_path else trainer.global_step
    try:
        return max(1, optimizer_steps(trainer) - taken)
    except UnknownTotalSteps as error:
        raise UnknownTotalSteps(f"{needs}: {error.reason}") from error


# -- schedulers -------------------------------------------------------------------------------------------------------


def announce_schedule(module: pl.LightningModule | None) -> None:
    """Let the fit that a module is in know of a schedule."""
    if (trainer := trainer_of(module)) is not None:
        announce(trainer)


def _schedule(
    curve: Callable[..., float],
    optimizer: Optimizer,
    module: pl.LightningModule | None,
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
    total = max(1, settings["warmup"]) if endless else total_steps or count_steps(module, curve.__name__)
    steps = _in_steps(settings, total, is_trial=total_steps is None and _is_trial(module))
    cycled = None
    if momentum is not None:
        low, high = map(float, momentum)
        cycled = partial(curves.one_cycle_momentum, total_steps=total, warmup=steps["warmup"], low=low, high=high)
    announce_schedule(module)
    bound = partial(curve, total_steps=None if endless else total, **steps)
    return _dictionary(CurveLR(optimizer, bound, momentum=cycled))


def _is_trial(module: pl.LightningModule | None) -> bool:
    """Whether a fit is a trial of the training that durations in steps were chosen for."""
    trainer = trainer_of(module)
    return trainer is not None and bool(trainer.fast_dev_run or trainer.overfit_batches > 0)  # type: ignore[attr-defined]


def _dictionary(scheduler: CurveLR) -> Schedule:
    """The dictionary for ``configure_optimizers`` of a scheduler that steps with the optimizer."""
    config: LRSchedulerConfigType = {"scheduler": scheduler, "interval": "step", "frequency": 1}
    return {"optimizer": scheduler.optimizer, "lr_scheduler": config}
