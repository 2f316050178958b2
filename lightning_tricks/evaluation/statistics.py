"""Mean and 95% interval of a few runs, and of their paired differences, by Student's t."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, isfinite, nan, pi, sin, sqrt
from statistics import fmean, stdev
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean and the 95% interval in which it lies.

    Args:
        mean: Mean of the values.
        std: Standard deviation of the values, with n - 1.
        low: Lower end of the interval of the mean.
        high: Upper end of the interval of the mean.
    """

    mean: float
    std: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below zero, 0 where it tells neither."""
        return (self.low > 0) - (self.high < 0)


def mean_and_interval(values: Sequence[float], *, overlap: float = 0.0) -> Interval:
    """The mean of runs: ``mean +- t * std * sqrt(1 / n + overlap)``, t being Student's for n - 1; NaN tells nothing.

    Args:
        values: Results of at least two runs.
        overlap: What runs share with each other: 0 for independent ones such as other seeds, the size of the test set
            by that of the training set for folds of the same data (Nadeau and Bengio's correction).

    Raises:
        ValueError: For fewer than two values.

    Example:
        >>> [round(value, 2) for value in mean_and_interval([1.0, 2.0, 3.0])]
        [2.0, 1.0, -0.48, 4.48]

    References:
        Nadeau and Bengio, Inference for the generalization error, Machine Learning 52 (2003).
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs at least 2 values, got {len(values)}: run more folds or seeds.")
    mean = fmean(values)
    std = stdev(values) if isfinite(mean) else nan
    half = student_t(len(values) - 1) * std * sqrt(1 / len(values) + overlap)
    return Interval(mean, std, mean - half, mean + half)


def paired_difference(values: Sequence[float], others: Sequence[float], *, overlap: float = 0.0) -> Interval:
    """The mean of ``values[i] - others[i]`` and its interval, runs ``i`` having a seed or a fold in common.

    Example:
        >>> paired_difference([2.0, 3.0, 5.2], [1.0, 2.0, 4.0]).sign
        1
    """
    if len(values) != len(others):
        raise ValueError(f"paired runs need the same seeds or folds, got {len(values)} and {len(others)} runs.")
    return mean_and_interval([value - other for value, other in zip(values, others, strict=True)], overlap=overlap)


def student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t, found by bisection of the closed form for a whole number of degrees.

    References:
        Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    low, high = 0.0, pi / 2  # of atan(t / sqrt(freedom))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < 0.95 else (low, middle)
    return sqrt(freedom) * sin(low) / cos(low)


def _inside(angle: float, freedom: int) -> float:
    """The probability of a value between -t and t."""
    odd = freedom % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cos(angle) ** 2 * (k - 1) / k
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
