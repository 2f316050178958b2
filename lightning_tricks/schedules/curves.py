"""Learning-rate curves: the factor of the base learning rate at each optimizer step, in closed form.

Every curve is a function of the step and nothing else. ``warmup`` and the other lengths are in optimizer steps and
may be fractional. Past ``total_steps`` a curve stays at its last value.
"""

from __future__ import annotations

import math


def _ramp(step: float, warmup: float) -> float:
    return min(1.0, (step + 1) / warmup)


def _progress(step: float, start: float, end: float) -> float:
    return min(1.0, max(0.0, (step - start) / (end - start))) if end > start else float(step >= end)


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def constant(step: float, *, total_steps: int, warmup: float = 0, floor: float = 0.0) -> float:
    """Warm-up, then 1: ``f(t) = min(1, (t+1)/W)``; total_steps and floor are not reached.

    Args:
        step: t, the optimizer steps taken so far.
        total_steps: T.
        warmup: W, steps of linear warm-up.
        floor: Lowest factor after the warm-up; a constant curve never falls to it.

    Returns:
        The factor of the base learning rate.

    Example:
        >>> [constant(t, total_steps=4, warmup=2) for t in range(4)]
        [0.5, 1.0, 1.0, 1.0]
    """
    return _ramp(step, warmup) if step < warmup else 1.0


def linear(step: float, *, total_steps: int, warmup: float = 0, floor: float = 0.0) -> float:
    """Warm-up, then a straight line to the floor: ``f(t) = floor + (1-floor) (1-p)``, ``p = (t-W)/(T-W)``.

    Args:
        step: t, the optimizer steps taken so far.
        total_steps: T.
        warmup: W, steps of linear warm-up, ``(t+1)/W``.
        floor: Factor at T and after.

    Returns:
        The factor of the base learning rate.

    Example:
        >>> [linear(t, total_steps=4) for t in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < warmup:
        return _ramp(step, warmup)
    return floor + (1 - floor) * (1 - _progress(step, warmup, total_steps))


def cosine(step: float, *, total_steps: int, warmup: float = 0, floor: float = 0.0) -> float:
    """Warm-up, then half a cosine to the floor: ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-W)/(T-W)``.

    Args:
        step: t, the optimizer steps taken so far.
        total_steps: T.
        warmup: W, steps of linear warm-up, ``(t+1)/W``.
        floor: Factor at T and after.

    Returns:
        The factor of the base learning rate.

    Example:
        >>> [round(cosine(t, total_steps=4), 3) for t in range(6)]
        [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]

    References:
        Loshchilov and Hutter, SGDR, arXiv 1608.03983.
    """
    if step < warmup:
        return _ramp(step, warmup)
    return floor + (1 - floor) * _cosine(_progress(step, warmup, total_steps))


def flat_cos(
    step: float, *, total_steps: int, warmup: float = 0, flat: float | None = None, floor: float = 0.0
) -> float:
    """Warm-up, flat at 1, then half a cosine to the floor.

    ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-F)/(T-F)``

    Args:
        step: t, the optimizer steps taken so far.
        total_steps: T.
        warmup: W, steps of linear warm-up, ``(t+1)/W``.
        flat: F, the step at which the factor starts to fall; by default three quarters of T.
        floor: Factor at T and after.

    Returns:
        The factor of the base learning rate.

    Example:
        >>> [round(flat_cos(t, total_steps=8, flat=4), 3) for t in range(9)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]

    References:
        ``fit_flat_cos`` of fastai.
    """
    if step < warmup:
        return _ramp(step, warmup)
    return floor + (1 - floor) * _cosine(_progress(step, 0.75 * total_steps if flat is None else flat, total_steps))


def one_cycle(
    step: float, *, total_steps: int, warmup: float | None = None, start: float = 1 / 25, floor: float = 4e-6
) -> float:
    """Up by half a cosine from ``start`` to 1 and down to the floor; equals torch's OneCycleLR.

    ``f(t) = start + (1-start) (1-cos(pi t/(W-1)))/2`` up to step W-1, then
    ``f(t) = floor + (1-floor) (1+cos(pi p))/2`` with ``p = (t-W+1)/(T-W)``, which is at the floor in the last step.

    Args:
        step: t, the optimizer steps taken so far.
        total_steps: T.
        warmup: W, steps of the way up; by default 0.3 T.
        start: Factor of the first step.
        floor: Factor at step T-1 and after.

    Returns:
        The factor of the base learning rate, which is the highest one of the cycle.

    Example:
        >>> [round(one_cycle(t, total_steps=10), 3) for t in range(10)]
        [0.04, 0.52, 1.0, 0.95, 0.812, 0.611, 0.389, 0.188, 0.05, 0.0]

    References:
        Smith and Topin, Super-Convergence, arXiv 1708.07120.
    """
    peak = (0.3 * total_steps if warmup is None else warmup) - 1
    if step < peak:
        return start + (1 - start) * (1 - _cosine(step / peak))
    return floor + (1 - floor) * _cosine(_progress(step, peak, total_steps - 1))
