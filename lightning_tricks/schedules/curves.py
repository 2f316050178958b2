"""Learning-rate curves: the factor of the base learning rate at each optimizer step, in closed form.

Every curve is a function of the step and nothing else: ``f(t)`` after t optimizer steps, T in all (``total_steps``),
with a linear warm-up ``f(t) = min(1, (t+1)/W)`` while ``t < W`` (``warmup``, in steps, may be fractional). p is the
progress of the fall, clipped to [0, 1], so past T a curve stays at its last value. The factories of the same names in
``lightning_tricks.schedules`` document the arguments.
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
    """1 after the warm-up; total_steps and floor are not reached.

    >>> [constant(t, total_steps=4, warmup=2) for t in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    return _ramp(step, warmup) if step < warmup else 1.0


def linear(step: float, *, total_steps: int, warmup: float = 0, floor: float = 0.0) -> float:
    """A straight line to the floor: ``f(t) = floor + (1-floor) (1-p)``, ``p = (t-W)/(T-W)``.

    >>> [linear(t, total_steps=4) for t in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < warmup:
        return _ramp(step, warmup)
    return floor + (1 - floor) * (1 - _progress(step, warmup, total_steps))


def cosine(step: float, *, total_steps: int, warmup: float = 0, floor: float = 0.0) -> float:
    """Half a cosine to the floor: ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-W)/(T-W)``.

    >>> [round(cosine(t, total_steps=4), 3) for t in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return flat_cos(step, total_steps=total_steps, warmup=warmup, flat=warmup, floor=floor)


def flat_cos(
    step: float, *, total_steps: int, warmup: float = 0, flat: float | None = None, floor: float = 0.0
) -> float:
    """1 up to step F (0.75 T by default), then ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-F)/(T-F)``.

    >>> [round(flat_cos(t, total_steps=8, flat=4), 3) for t in range(9)]
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return _ramp(step, warmup)
    return floor + (1 - floor) * _cosine(_progress(step, 0.75 * total_steps if flat is None else flat, total_steps))


def one_cycle(
    step: float, *, total_steps: int, warmup: float | None = None, start: float = 1 / 25, floor: float = 4e-6
) -> float:
    """Up by half a cosine from ``start`` to 1 at step W-1 and down to the floor at T-1; equals torch's OneCycleLR.

    ``f(t) = start + (1-start) (1-cos(pi t/(W-1)))/2`` up to step W-1 (W is 0.3 T by default), then
    ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-W+1)/(T-W)``.

    >>> [round(one_cycle(t, total_steps=10), 3) for t in range(10)]
    [0.04, 0.52, 1.0, 0.95, 0.812, 0.611, 0.389, 0.188, 0.05, 0.0]
    """
    peak = (0.3 * total_steps if warmup is None else warmup) - 1
    if step < peak:
        return start + (1 - start) * (1 - _cosine(step / peak))
    return floor + (1 - floor) * _cosine(_progress(step, peak, total_steps - 1))
