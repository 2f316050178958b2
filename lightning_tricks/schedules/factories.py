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

from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
from torch.optim import Optimizer

from lightning_tricks.schedules import curves
from lightning_tricks.schedules.arguments import Duration
from lightning_tricks.schedules.planned import Schedule, planned_schedule

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
    "wsd",
]


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
    return planned_schedule(curves.constant, optimizer, module, total_steps, endless=True, warmup=warmup, floor=floor)


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
    return planned_schedule(curves.linear, optimizer, module, total_steps, warmup=warmup, floor=floor)


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
    return planned_schedule(curves.cosine, optimizer, module, total_steps, warmup=warmup, floor=floor)


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
    return planned_schedule(curves.polynomial, optimizer, module, total_steps, warmup=warmup, power=power, floor=floor)


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
    return planned_schedule(
        curves.inverse_sqrt, optimizer, module, total_steps, endless=True, warmup=warmup, floor=floor
    )


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
    return planned_schedule(curves.step_decay, optimizer, module, total_steps, **settings)


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
    return planned_schedule(curves.flat_cos, optimizer, module, total_steps, warmup=warmup, flat=flat, floor=floor)


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
    return planned_schedule(curves.one_cycle, optimizer, module, total_steps, momentum=momentum, **settings)


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
    return planned_schedule(curves.wsd, optimizer, module, total_steps, **settings)


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
    return planned_schedule(curves.cosine_restarts, optimizer, module, total_steps, **settings)


CURVES = {
    factory.__name__: factory
    for factory in (
        *(constant, cosine, cosine_restarts, flat_cos, inverse_sqrt),
        *(linear, one_cycle, polynomial, step_decay, wsd),
    )
}
