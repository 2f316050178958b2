"""Learning-rate curves: the factor of the base learning rate at each optimizer step, in closed form.

Every curve is a function of the step and nothing else: ``f(t)`` after t of T optimizer steps (``total_steps``), with a
linear warm-up ``f(t) = min(1, (t+1)/W)`` while ``t < W`` (``warmup``). All lengths are in steps and may be fractional.
p is the progress of the decay, clipped to [0, 1], so past T a curve stays at its last value. The factories of the same
names in ``lightning_tricks.schedules`` document the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def _ramp(step: float, warmup: float) -> float:
    return min(1.0, (step + 1) / warmup)


def _progress(step: float, start: float, end: float) -> float:
    return min(1.0, max(0.0, (step - start) / (end - start))) if end > start else float(step >= end)


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def constant(step: float, *, total_steps: int | None = None, warmup: float = 0, floor: float = 0.0) -> float:
    """1 after the warm-up; ``total_steps`` and ``floor`` have no effect.

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
    step: float, *, total_steps: int, warmup: float | None = None, initial: float = 0.04, floor: float = 4e-6
) -> float:
    """Up by half a cosine from ``initial`` to 1 at step W-1 and down to the floor at T-1; equals torch's OneCycleLR.

    ``f(t) = initial + (1-initial) (1-cos(pi t/(W-1)))/2`` up to step W-1 (W is 0.3 T by default), then
    ``f(t) = floor + (1-floor) (1+cos(pi p))/2``, ``p = (t-W+1)/(T-W)``.

    >>> [round(one_cycle(t, total_steps=10), 3) for t in range(10)]
    [0.04, 0.52, 1.0, 0.95, 0.812, 0.611, 0.389, 0.188, 0.05, 0.0]
    """
    peak = (0.3 * total_steps if warmup is None else warmup) - 1
    if step < peak:
        return initial + (1 - initial) * (1 - _cosine(step / peak))
    return floor + (1 - floor) * _cosine(_progress(step, peak, total_steps - 1))


def one_cycle_momentum(
    step: float, *, total_steps: int, warmup: float | None = None, low: float = 0.85, high: float = 0.95
) -> float:
    """The momentum beside ``one_cycle``: down from ``high`` to ``low`` while the rate goes up, and back.

    >>> [round(one_cycle_momentum(t, total_steps=10), 3) for t in range(10)]
    [0.95, 0.9, 0.85, 0.855, 0.869, 0.889, 0.911, 0.931, 0.945, 0.95]
    """
    peak = (0.3 * total_steps if warmup is None else warmup) - 1
    decay = _cosine(step / peak) if step < peak else 1 - _cosine(_progress(step, peak, total_steps - 1))
    return low + (high - low) * decay


def cosine_restarts(
    step: float, *, total_steps: int, warmup: float = 0, cycles: int = 3, growth: float = 1.0, floor: float = 0.0
) -> float:
    """Cosines from 1 to the floor one after the other, each ``growth`` times as long as the one before it.

    ``f(t) = floor + (1-floor) (1+cos(pi p))/2`` with p the progress within the cycle; the floor from T on.

    >>> [round(cosine_restarts(t, total_steps=8, cycles=2), 3) for t in range(9)]
    [1.0, 0.854, 0.5, 0.146, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return _ramp(step, warmup)
    if step >= total_steps:
        return floor
    length = (total_steps - warmup) * ((growth - 1) / (growth**cycles - 1) if growth > 1 else 1 / cycles)
    start, last = warmup, cycles - 1
    while last and step > start + length - 1e-9:  # a sum of thirds can miss a whole step by a rounding error
        start, length, last = start + length, length * growth, last - 1
    return floor + (1 - floor) * _cosine(_progress(step, start, start + length))


def polynomial(step: float, *, total_steps: int, warmup: float = 0, power: float = 0.9, floor: float = 0.0) -> float:
    """A power of what is left: ``f(t) = floor + (1-floor) (1-p)**power``, ``p = (t-W)/(T-W)``.

    >>> [polynomial(t, total_steps=4, power=2.0) for t in range(6)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    if step < warmup:
        return _ramp(step, warmup)
    return floor + (1 - floor) * (1 - _progress(step, warmup, total_steps)) ** power


def inverse_sqrt(step: float, *, total_steps: int | None = None, warmup: float = 0, floor: float = 0.0) -> float:
    """``f(t) = max(floor, sqrt(W/(t+1)))`` after the warm-up (W at least 1); ``total_steps`` has no effect.

    >>> [round(inverse_sqrt(t, total_steps=1, warmup=4), 3) for t in (0, 3, 15, 63)]
    [0.25, 1.0, 0.5, 0.25]
    """
    return _ramp(step, warmup) if step < warmup else max(floor, math.sqrt(max(warmup, 1) / (step + 1)))


def wsd(
    step: float,
    *,
    total_steps: int,
    warmup: float = 0,
    cooldown: float | None = None,
    shape: str = "1-sqrt",
    floor: float = 0.0,
) -> float:
    """Warm-up, stable, decay: 1 until the last C steps (0.2 T by default), then down to the floor at T.

    ``f(t) = floor + (1-floor) g(p)``, ``p = (t-T+C)/C`` with ``g(p)`` of ``1-sqrt(p)``, ``1-p`` ("linear") or
    ``(1+cos(pi p))/2`` ("cosine").

    >>> [round(wsd(t, total_steps=8, cooldown=4), 3) for t in range(9)]
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.293, 0.134, 0.0]
    """
    if step < warmup:
        return _ramp(step, warmup)
    length = 0.2 * total_steps if cooldown is None else cooldown
    return floor + (1 - floor) * COOLDOWNS[shape](_progress(step, total_steps - length, total_steps))


COOLDOWNS: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
    "linear": lambda progress: 1 - progress,
    "cosine": _cosine,
}


def step_decay(
    step: float,
    *,
    total_steps: int,
    warmup: float = 0,
    milestones: Sequence[float] | None = None,
    gamma: float = 0.1,
    floor: float = 0.0,
) -> float:
    """``f(t) = max(floor, gamma**n)`` with n of the milestones (0.5 T and 0.75 T by default) reached.

    >>> [step_decay(t, total_steps=8, gamma=0.5) for t in range(8)]
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    if step < warmup:
        return _ramp(step, warmup)
    reached = (0.5 * total_steps, 0.75 * total_steps) if milestones is None else milestones
    return max(floor, gamma ** sum(step >= milestone for milestone in reached))


def swa_tail(step: float, *, curve: Callable[[float], float], start: float, level: float, anneal: float = 0) -> float:
    """Another curve up to step S, then half a cosine over A steps to ``level``, and constant.

    ``f(t) = level + (curve(S) - level) (1+cos(pi p))/2``, ``p = (t-S)/A`` from S on.

    >>> from functools import partial
    >>> half = partial(cosine, total_steps=8)
    >>> [round(swa_tail(t, curve=half, start=4, level=0.25, anneal=2), 3) for t in range(8)]
    [1.0, 0.962, 0.854, 0.691, 0.5, 0.375, 0.25, 0.25]
    """
    if step < start:
        return curve(step)
    return level + (curve(start) - level) * _cosine(_progress(step, start, start + anneal))
