"""Schedules for ``configure_optimizers`` with several phases; all is as in factories.py."""

from __future__ import annotations

from functools import partial
from typing import Literal

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_tricks.core.checks import check_duration, check_range
from lightning_tricks.core.steps import UnknownTotalSteps
from lightning_tricks.schedules import curves
from lightning_tricks.schedules.build import Duration, Schedule, build, whole_steps, wrapped
from lightning_tricks.schedules.scheduler import CurveLR, base_lr


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
        warmup: W, length of the linear warm-up, ``(t+1)/W`` (int steps, float fraction).
        flat: F, when the cosine starts (int steps, float fraction of training), at least W.
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> flat_cos(optimizer, total_steps=100, warmup=4)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.025]

    References:
        ``fit_flat_cos`` of fastai.
    """
    return build(curves.flat_cos, optimizer, module, total_steps, warmup=warmup, flat=flat, floor=floor)


def one_cycle(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0.3,
    start: float = 1 / 25,
    floor: float = 4e-6,
    momentum: tuple[float, float] | None = None,
) -> Schedule:
    """Up by half a cosine from ``start`` to the base learning rate, then down to the floor (torch's OneCycleLR).

    ``f(t) = start + (1-start) (1-cos(pi t/(W-1)))/2`` up to step W-1, then
    ``f(t) = floor + (1-floor) (1+cos(pi p))/2`` with ``p = (t-W+1)/(T-W)``. The optimizer's learning rate is the
    highest one of the cycle.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the way up (int steps, float fraction); ``pct_start`` of torch.
        start: Factor of the first step, in [0, 1]; ``1/div_factor`` of torch.
        floor: Factor of the last step and after, in [0, 1]; ``1/(div_factor*final_div_factor)`` of torch.
        momentum: Lowest and highest momentum, or first beta: down while the rate goes up, and back, for example
            (0.85, 0.95). None leaves it alone.

    Raises:
        ValueError: If a length or a factor is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> one_cycle(optimizer, total_steps=10)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.004]

    References:
        Smith and Topin, Super-Convergence, arXiv 1708.07120.
    """
    return build(curves.one_cycle, optimizer, module, total_steps, momentum, warmup=warmup, start=start, floor=floor)


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
        warmup: W, length of the linear warm-up, ``(t+1)/W`` (int steps, float fraction).
        cooldown: C, length of the fall (int steps, float fraction).
        shape: ``g(p)``: "1-sqrt" for ``1-sqrt(p)``, "linear" for ``1-p``, "cosine" for ``(1+cos(pi p))/2``.
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> wsd(optimizer, total_steps=100, warmup=4)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.025]

    References:
        Haegele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, arXiv 2405.18392.
    """
    return build(curves.wsd, optimizer, module, total_steps, warmup=warmup, cooldown=cooldown, shape=shape, floor=floor)


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
        warmup: W, length of the linear warm-up, ``(t+1)/W`` (int steps, float fraction).
        cycles: How many, at least 1.
        growth: How many times as long as the one before each is, at least 1.
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> cosine_restarts(optimizer, total_steps=10, warmup=2)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.05]

    References:
        Loshchilov and Hutter, SGDR, arXiv 1608.03983.
    """
    return build(
        curves.cosine_restarts, optimizer, module, total_steps, warmup=warmup, cycles=cycles, growth=growth, floor=floor
    )


def swa_tail(schedule: Schedule, *, start: Duration = 0.75, swa_lr: float, anneal: Duration = 0) -> Schedule:
    """Another schedule up to step S, then a constant learning rate for averaging the weights.

    ``f(t) = level + (curve(S) - level) (1+cos(pi p))/2``, ``p = (t-S)/A`` from S on, ``level = swa_lr / base``

    Args:
        schedule: What another factory returned.
        start: S, when the tail begins (int steps, float fraction of training).
        swa_lr: The learning rate of the first parameter group in the tail; the others keep their ratio to it.
        anneal: A, length of the way there (int steps, float fraction).

    Raises:
        TypeError: For what no other factory of curves returned.
        ValueError: If a length or the learning rate is out of range, or the tail starts in the warm-up.
        UnknownTotalSteps: For a fraction, behind a schedule without an end (constant, inverse_sqrt).

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
    check_duration("start", start)
    check_duration("anneal", anneal)
    check_range("swa_lr", swa_lr, 0.0)
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
    if total is not None and first + length > total + 1e-9:
        raise ValueError(
            f"start and anneal must end by total_steps={total}, got {start!r} and {anneal!r} (step {first + length:g}):"
            " start earlier or anneal for fewer steps."
        )
    base = float(base_lr(scheduler.optimizer.param_groups[0]))
    if not base:
        raise ValueError("swa_lr is relative to the first parameter group's learning rate, which must not be 0, got 0.")
    curve = partial(
        curves.swa_tail,
        curve=scheduler.curve,
        start=first,
        level=float(swa_lr) / base,
        anneal=length,
    )
    around = CurveLR(scheduler.optimizer, curve, momentum=scheduler.momentum)
    scheduler.replaced = True
    return wrapped(around)
