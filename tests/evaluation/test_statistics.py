"""Intervals of means: against scipy, and against their promise to hold the truth in 95 of 100 cases."""

from __future__ import annotations

import random
from math import inf, isnan, nan

import numpy
import pytest
from scipy import stats

from lightning_tricks.evaluation.statistics import Interval, mean_and_interval, paired_difference, student_t


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 30, 101])
def test_the_quantile_is_that_of_scipy(freedom: int) -> None:
    assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_the_interval_is_that_of_scipy() -> None:
    values = [0.91, 0.87, 0.95, 0.9, 0.88]
    found = mean_and_interval(values)
    assert (found.mean, found.std) == pytest.approx((numpy.mean(values), numpy.std(values, ddof=1)))
    expected = stats.t.interval(0.95, 4, loc=numpy.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)


def test_the_true_mean_is_inside_95_times_of_100() -> None:
    numbers = random.Random(0)
    runs = [mean_and_interval([numbers.gauss(3, 2) for _ in range(4)]) for _ in range(4000)]
    assert sum(run.low <= 3 <= run.high for run in runs) / len(runs) == pytest.approx(0.95, abs=0.01)


def test_folds_that_share_training_data_tell_less() -> None:
    values = [1.0, 2.0, 4.0, 4.5, 5.0]
    apart, folds = mean_and_interval(values), mean_and_interval(values, overlap=1 / 4)
    assert folds.mean == apart.mean
    assert (folds.high - folds.mean) / (apart.high - apart.mean) == pytest.approx((1 + 5 / 4) ** 0.5)


def test_paired_differences_tell_apart_what_means_do_not() -> None:
    plain, trick = [0.5, 0.7, 0.9], [0.52, 0.73, 0.92]
    assert mean_and_interval(plain).high > mean_and_interval(trick).low
    assert paired_difference(trick, plain).sign == 1
    assert paired_difference(plain, trick) == pytest.approx(stats_paired(plain, trick))
    assert paired_difference(plain, trick).sign == -1
    assert paired_difference([1.0, 2.0], [2.0, 1.0]).sign == 0
    assert Interval(0.0, 0.0, -inf, inf).sign == 0


def stats_paired(values: list[float], others: list[float]) -> list[float]:
    differences = numpy.subtract(values, others)
    interval = stats.ttest_rel(values, others).confidence_interval(0.95)
    return [differences.mean(), differences.std(ddof=1), interval.low, interval.high]


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        mean_and_interval([1.0])
    with pytest.raises(ValueError, match="got 2 and 1 runs"):
        paired_difference([1.0, 2.0], [1.0])


def test_what_is_not_finite_tells_nothing() -> None:
    found = mean_and_interval([1.0, nan, 2.0])
    assert isnan(found.mean)
    assert isnan(found.std)
    assert found.sign == mean_and_interval([1.0, inf]).sign == 0
