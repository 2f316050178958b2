"""Schedules for ``configure_optimizers`` that fall from the base learning rate; phases.py has those of several phases.

Lengths are durations: an int counts optimizer steps, a float in [0, 1] is a fraction of training. The total is counted
from the module's Trainer unless ``total_steps`` is given. All return
``{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step", "frequency": 1}}``.
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_tricks.schedules import curves
from lightning_tricks.schedules.build import Duration, Schedule, build


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
    return build(curves.constant, optimizer, module, total_steps, endless=True, warmup=warmup, floor=floor)


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
    return build(curves.linear, optimizer, module, total_steps, warmup=warmup, floor=floor)


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
    return build(curves.cosine, optimizer, module, total_steps, warmup=warmup, floor=floor)


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
        warmup: W, length of the linear warm-up, ``(t+1)/W`` (int steps, float fraction).
        power: The exponent, at least 0; 1 is a straight line.
        floor: Factor at T and after, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> polynomial(optimizer, total_steps=10, warmup=2)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.05]
    """
    return build(curves.polynomial, optimizer, module, total_steps, warmup=warmup, power=power, floor=floor)


def inverse_sqrt(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
    *,
    total_steps: int | None = None,
    warmup: Duration = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then the inverse square root of the step: ``f(t) = max(floor, sqrt(W/(t+1)))``.

    It has no end: T is needed only where the warm-up is a fraction.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up, ``(t+1)/W`` (int steps, float fraction).
        floor: The lowest factor, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> inverse_sqrt(optimizer, warmup=4)["lr_scheduler"]["scheduler"].get_last_lr()
        [0.025]

    References:
        Vaswani et al., Attention Is All You Need, arXiv 1706.03762.
    """
    return build(curves.inverse_sqrt, optimizer, module, total_steps, endless=True, warmup=warmup, floor=floor)


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
    """Warm-up, then a fall by ``gamma`` at each milestone: ``f(t) = max(floor, gamma**n)`` behind n of them.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule, to count T from its Trainer (``self`` in ``configure_optimizers``).
        total_steps: T, the number of optimizer steps, instead of counting it.
        warmup: W, length of the linear warm-up, ``(t+1)/W`` (int steps, float fraction).
        milestones: When the rate falls, in order (int steps, float fractions of training).
        gamma: Factor of each fall, in [0, 1].
        floor: The lowest factor, in [0, 1].

    Raises:
        ValueError: If a length or another value is out of range.
        UnknownTotalSteps: If the total is not given and cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> step_decay(optimizer, total_steps=10, milestones=[0.5])["lr_scheduler"]["scheduler"].get_last_lr()
        [0.1]
    """
    return build(
        curves.step_decay,
        optimizer,
        module,
        total_steps,
        warmup=warmup,
        milestones=milestones,
        gamma=gamma,
        floor=floor,
    )
