"""Every curve equals its formula, written naively here, and torch's schedulers where torch has it."""

from __future__ import annotations

from functools import partial
from math import cos, pi

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
)

from lightning_tricks.schedules import curves


def naive_constant(t, T, W, floor):
    return (t + 1) / W if t < W else 1.0


def naive_linear(t, T, W, floor):
    if t < W:
        return (t + 1) / W
    return floor if t >= T else floor + (1 - floor) * (1 - (t - W) / (T - W))


def naive_cosine(t, T, W, floor):
    if t < W:
        return (t + 1) / W
    return floor if t >= T else floor + (1 - floor) * (1 + cos(pi * (t - W) / (T - W))) / 2


def naive_flat_cos(t, T, W, floor, F=None):
    F = 0.75 * T if F is None else F
    if t < W:
        return (t + 1) / W
    if t >= T:
        return floor
    return 1.0 if t <= F else floor + (1 - floor) * (1 + cos(pi * (t - F) / (T - F))) / 2


def torch_factors(scheduler: LRScheduler, steps: int) -> list[float]:
    factors = []
    for _ in range(steps):
        factors.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return factors


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 1, 3, 2.5, 0.4])
@pytest.mark.parametrize("total", [1, 4, 7, 50])
@pytest.mark.parametrize(
    ("curve", "naive"),
    [
        (curves.constant, naive_constant),
        (curves.linear, naive_linear),
        (curves.cosine, naive_cosine),
        (curves.flat_cos, naive_flat_cos),
        (partial(curves.flat_cos, flat=1), partial(naive_flat_cos, F=1)),
    ],
    ids=["constant", "linear", "cosine", "flat_cos", "flat_cos flat=1"],
)
def test_a_curve_equals_its_formula_at_every_step_and_past_the_end(curve, naive, total, warmup, floor):
    for t in range(total + 11):
        expected = min(1.0, naive(t, total, warmup, floor))
        assert curve(t, total_steps=total, warmup=warmup, floor=floor) == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("warmup", [1, 2, 2.5, 10])
@pytest.mark.parametrize("curve", [curves.constant, curves.linear, curves.cosine, curves.flat_cos])
def test_warmup_starts_at_one_part_and_never_at_zero(curve, warmup):
    assert curve(0, total_steps=20, warmup=warmup) == 1 / warmup
    assert all(
        curve(t, total_steps=20, warmup=warmup) == pytest.approx(min(1, (t + 1) / warmup)) for t in range(int(warmup))
    )


@pytest.mark.parametrize("curve", [curves.constant, curves.linear, curves.cosine, curves.flat_cos, curves.one_cycle])
def test_a_curve_stays_at_its_last_value_past_the_end(curve):
    assert {curve(t, total_steps=7, floor=0.25) for t in range(7, 40)} == {1.0 if curve is curves.constant else 0.25}


@pytest.mark.parametrize("curve", [curves.constant, curves.linear, curves.cosine, curves.flat_cos, curves.one_cycle])
@pytest.mark.parametrize("warmup", [0, 1, 2.5, 11])
def test_a_factor_lies_between_zero_and_one(curve, warmup):
    assert all(0 <= curve(t, total_steps=11, warmup=warmup) <= 1 for t in range(30))


@pytest.mark.parametrize("total", [1, 2, 3, 4, 7, 10, 11, 33, 100, 101])
@pytest.mark.parametrize(
    ("pct", "div", "final"), [(0.3, 25.0, 1e4), (0.15, 25.0, 1e4), (0.77, 25.0, 1e4), (0.3, 10.0, 50.0)]
)
def test_one_cycle_equals_torch(optimizer, total, pct, div, final):
    theirs = OneCycleLR(
        optimizer, 1.0, total, pct_start=pct, div_factor=div, final_div_factor=final, cycle_momentum=False
    )
    settings = {"total_steps": total, "warmup": pct * total, "start": 1 / div, "floor": 1 / div / final}
    ours = [curves.one_cycle(t, **settings) for t in range(total)]
    assert ours == pytest.approx(torch_factors(theirs, total), rel=0, abs=1e-12)


@pytest.mark.parametrize("total", [1, 2, 3, 10, 33])
def test_one_cycle_has_the_defaults_of_torch(optimizer, total):
    expected = torch_factors(OneCycleLR(optimizer, 1.0, total, cycle_momentum=False), total)
    ours = [curves.one_cycle(t, total_steps=total) for t in range(total)]
    assert ours == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize("total", [1, 2, 10, 101])
def test_cosine_equals_torch_up_to_the_end(optimizer, total, floor):
    expected = torch_factors(CosineAnnealingLR(optimizer, total, eta_min=floor), total + 1)
    ours = [curves.cosine(t, total_steps=total, floor=floor) for t in range(total + 1)]
    assert ours == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize("total", [1, 2, 10, 101])
def test_linear_equals_torch(optimizer, total, floor):
    expected = torch_factors(LinearLR(optimizer, 1.0, floor, total_iters=total), total + 10)
    ours = [curves.linear(t, total_steps=total, floor=floor) for t in range(total + 10)]
    assert ours == pytest.approx(expected, rel=0, abs=1e-12)
