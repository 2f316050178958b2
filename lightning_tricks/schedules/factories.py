"""Schedules for ``configure_optimizers``: each returns the whole dictionary that Lightning wants.

Lengths are durations: an int counts optimizer steps, a float in [0, 1] is a fraction of training. The total is counted
from the module's Trainer unless ``total_steps`` is given. All return
``{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step", "frequency": 1}}``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_tricks.core.checks import check_count, check_duration, check_range, duration_steps
from lightning_tricks.schedules import curves
from lightning_tricks.schedules.scheduler import CurveLR
from lightning_tricks.schedules.steps import UnknownTotalSteps, optimizer_steps

Schedule = dict[str, Any]
_DURATIONS = ("warmup", "flat")


def constant(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: float = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then the base learning rate: ``f(t) = min(1, (t+1)/W)``.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer; needed only if ``warmup`` is a fraction.
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        floor: As for the other curves; a constant one never falls to it.

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If the total is needed and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> constant(optimizer, warmup=4)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.025]
    """
    if total_steps is None and isinstance(warmup, int):
        total_steps = max(warmup, 1)  # nothing of this curve depends on the total
    return _schedule(curves.constant, optimizer, module, total_steps, warmup=warmup, floor=floor)


def linear(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: float = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then a straight line to the floor: ``f(t) = floor + (1-floor) (1-p)``, ``p = (t-W)/(T-W)``.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up, ``(t+1)/W`` (int steps, float fraction).
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

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
    warmup: float = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then half a cosine to the floor: ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-W)/(T-W)``.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up, ``(t+1)/W`` (int steps, float fraction).
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or the floor is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> cosine(optimizer, total_steps=10, warmup=0.2)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.05]

    References:
        Loshchilov and Hutter, SGDR, arXiv 1608.03983.
    """
    return _schedule(curves.cosine, optimizer, module, total_steps, warmup=warmup, floor=floor)


def flat_cos(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: float = 0,
    flat: float = 0.75,
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
    return _schedule(curves.flat_cos, optimizer, module, total_steps, warmup=warmup, flat=flat, floor=floor)


def one_cycle(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: float = 0.3,
    start: float = 1 / 25,
    floor: float = 4e-6,
) -> Schedule:
    """Up by half a cosine from ``start`` to the base learning rate, then down to the floor (torch's OneCycleLR).

    ``f(t) = start + (1-start) (1-cos(pi t/(W-1)))/2`` up to step W-1, then
    ``f(t) = floor + (1-floor) (1+cos(pi p))/2`` with ``p = (t-W+1)/(T-W)``. The optimizer's learning rate is the
    highest one of the cycle. Momentum is left alone.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the way up (int steps, float fraction); ``pct_start`` of torch.
        start: Factor of the first step, in [0, 1]; ``1/div_factor`` of torch.
        floor: Factor of the last step and after, in [0, 1]; ``1/(div_factor*final_div_factor)`` of torch.

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
    return _schedule(curves.one_cycle, optimizer, module, total_steps, warmup=warmup, start=start, floor=floor)


def check_settings(settings: dict[str, float]) -> None:
    """Raise unless every length is a duration and every factor lies in [0, 1]."""
    for name, value in settings.items():
        if name in _DURATIONS:
            check_duration(name, value)
        else:
            check_range(name, value, 0.0, 1.0)


def _schedule(
    curve: Callable[..., float],
    optimizer: Optimizer,
    module: pl.LightningModule | None,
    total_steps: int | None,
    **settings: float,
) -> Schedule:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer (module comes second), got {optimizer!r}.")
    check_settings(settings)
    total = _count(module) if total_steps is None else total_steps
    check_count("total_steps", total)
    steps = {name: duration_steps(settings[name], total) for name in _DURATIONS if name in settings}
    for name, value in steps.items():
        if value > total:
            raise ValueError(f"{name} must be at most total_steps={total}, got {settings[name]!r}.")
    if "flat" in steps and steps["flat"] < steps["warmup"]:
        raise ValueError(
            f"flat must not start before warmup ends at step {steps['warmup']:g}, got flat={settings['flat']!r}"
            f" (step {steps['flat']:g} of {total})."
        )
    plain = {name: float(value) for name, value in {**settings, **steps}.items()}
    scheduler = CurveLR(optimizer, partial(curve, total_steps=total, **plain))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


def _count(module: pl.LightningModule | None) -> int:
    if module is None:
        raise UnknownTotalSteps("neither module nor total_steps was given: pass the module (self) to count them")
    if not isinstance(module, pl.LightningModule):
        raise TypeError(f"module must be a LightningModule, got {type(module).__name__}.")
    try:
        trainer = module.trainer
    except RuntimeError as error:
        raise UnknownTotalSteps("the module has no Trainer yet (call this in configure_optimizers)") from error
    # a Trainer that fits a second time goes on counting, but this schedule starts anew; a resumed one is restored
    taken = 0 if trainer.ckpt_path else trainer.global_step
    return max(1, optimizer_steps(trainer) - taken)
