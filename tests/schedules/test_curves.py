"""Every curve equals its formula, written naively here, and torch's schedulers where torch has it."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import cos, pi, sqrt

import pytest
import torch
from torch.optim import lr_scheduler

from lightning_tricks.schedules import curves


def half_cosine(p):
    return (1 + cos(pi * p)) / 2


def exact(number):
    return Fraction(str(number))


def naive_constant(t, T, W, floor):
    return 1.0


def naive_linear(t, T, W, floor):
    return floor if t >= T else floor + (1 - floor) * (1 - (t - W) / (T - W))


def naive_cosine(t, T, W, floor):
    return floor if t >= T else floor + (1 - floor) * half_cosine((t - W) / (T - W))


def naive_flat_cos(t, T, W, floor, F=None):
    F = 0.75 * T if F is None else F
    if t >= T:
        return floor
    return 1.0 if t <= F else floor + (1 - floor) * half_cosine((t - F) / (T - F))


def naive_polynomial(t, T, W, floor, power=0.9):
    return floor if t >= T else floor + (1 - floor) * (1 - (t - W) / (T - W)) ** power


def naive_inverse_sqrt(t, T, W, floor):
    return max(floor, sqrt((W if W > 1 else 1) / (t + 1)))


def naive_wsd(t, T, W, floor, C=None, shape="1-sqrt"):
    C = 0.2 * T if C is None else C
    if t >= T:
        return floor
    if t <= T - C:
        return 1.0
    p = (t - T + C) / C
    fall = {"1-sqrt": 1 - sqrt(p), "linear": 1 - p, "cosine": half_cosine(p)}[shape]
    return floor + (1 - floor) * fall


def naive_step_decay(t, T, W, floor, milestones=None, gamma=0.1):
    factor = 1.0
    for milestone in (T / 2, 3 * T / 4) if milestones is None else milestones:
        if t >= milestone:
            factor *= gamma
    return max(factor, floor)


def naive_restarts(t, T, W, floor, cycles=3, growth=1):
    if t >= T:
        return floor
    W, growth = exact(W), exact(growth)
    unit = (T - W) / sum(growth**n for n in range(cycles))
    start = W
    for n in range(cycles):
        end = start + unit * growth**n
        if start <= t < end:
            return floor + (1 - floor) * half_cosine(float((t - start) / (end - start)))
        start = end
    raise AssertionError(t)


def naive_one_cycle(t, T, W, floor, start=1 / 25):
    if t < W - 1:
        return start + (1 - start) * (1 - cos(pi * t / (W - 1))) / 2
    return floor if t >= T - 1 else floor + (1 - floor) * half_cosine((t - W + 1) / (T - W))


WARMED = [
    (curves.constant, naive_constant),
    (curves.linear, naive_linear),
    (curves.cosine, naive_cosine),
    (curves.flat_cos, naive_flat_cos),
    (partial(curves.flat_cos, flat=1), partial(naive_flat_cos, F=1)),
    (partial(curves.flat_cos, flat=2.5), partial(naive_flat_cos, F=2.5)),
    (curves.polynomial, naive_polynomial),
    (partial(curves.polynomial, power=2), partial(naive_polynomial, power=2)),
    (partial(curves.polynomial, power=0.5), partial(naive_polynomial, power=0.5)),
    (curves.inverse_sqrt, naive_inverse_sqrt),
    (curves.wsd, naive_wsd),
    (partial(curves.wsd, cooldown=1), partial(naive_wsd, C=1)),
    (partial(curves.wsd, cooldown=0), partial(naive_wsd, C=0)),
    *((partial(curves.wsd, shape=s), partial(naive_wsd, shape=s)) for s in curves.COOLDOWNS),
    *((partial(curves.wsd, cooldown=2.5, shape=s), partial(naive_wsd, C=2.5, shape=s)) for s in curves.COOLDOWNS),
    (curves.step_decay, naive_step_decay),
    (partial(curves.step_decay, gamma=0.5), partial(naive_step_decay, gamma=0.5)),
    (partial(curves.step_decay, milestones=(3, 3, 7.5)), partial(naive_step_decay, milestones=(3, 3, 7.5))),
    (partial(curves.step_decay, milestones=()), partial(naive_step_decay, milestones=())),
    (curves.cosine_restarts, naive_restarts),
    *(
        (partial(curves.cosine_restarts, cycles=c, growth=g), partial(naive_restarts, cycles=c, growth=g))
        for c, g in [(1, 1), (2, 1.0), (2, 2), (3, 2.0), (4, 1.5), (3, 3), (7, 1)]
    ),
]


def name(pair):
    curve = pair[0]
    return f"{curve.func.__name__} {curve.keywords}" if isinstance(curve, partial) else curve.__name__


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 1, 3, 2.5, 0.4])
@pytest.mark.parametrize(("curve", "naive"), WARMED, ids=map(name, WARMED))
def test_a_curve_equals_its_formula_at_every_step_and_past_the_end(curve, naive, warmup, floor):
    for total in range(1, 61):
        for t in range(total + 11):
            expected = min(1.0, (t + 1) / warmup) if t < warmup else naive(t, total, warmup, floor)
            ours = curve(t, total_steps=total, warmup=warmup, floor=floor)
            assert abs(ours - expected) <= 1e-12, (t, total)
            assert 0 < ours <= 1 if t == 0 and warmup else 0 <= ours <= 1


@pytest.mark.parametrize(("start", "floor"), [(1 / 25, 4e-6), (0.5, 0.0), (0.0, 0.25), (1.0, 1.0)])
@pytest.mark.parametrize("warmup", [0, 1, 2, 2.5, 11])
def test_one_cycle_equals_its_formula(warmup, start, floor):
    for total in range(max(1, int(warmup + 1)), 61):
        for t in range(total + 11):
            ours = curves.one_cycle(t, total_steps=total, warmup=warmup, start=start, floor=floor)
            assert abs(ours - naive_one_cycle(t, total, warmup, floor, start)) <= 1e-12, (t, total)
            assert 0 <= ours <= 1
            momentum = curves.one_cycle_momentum(t, total_steps=total, warmup=warmup, low=0.25, high=0.75)
            assert abs(momentum - (0.75 - 0.5 * naive_one_cycle(t, total, warmup, 0, 0))) <= 1e-12, (t, total)


@pytest.mark.parametrize("cycles", range(1, 12))
@pytest.mark.parametrize("growth", [1, 2, 3])
def test_every_restart_begins_at_one_however_its_length_is_rounded(cycles, growth):
    for unit in range(1, 40):
        starts = [unit * sum(growth**n for n in range(cycle)) for cycle in range(cycles + 1)]
        settings = {"total_steps": starts.pop(), "cycles": cycles, "growth": growth}
        assert {curves.cosine_restarts(start, **settings) for start in starts} == {1.0}, unit


@pytest.mark.parametrize("anneal", [0, 1, 2.5, 6])
@pytest.mark.parametrize("start", [0, 4, 4.5, 10])
@pytest.mark.parametrize("level", [0.0, 0.25, 2.0])
def test_swa_tail_equals_its_formula(start, anneal, level):
    before = partial(curves.linear, total_steps=10)
    for t in range(30):
        expected = 1 - t / 10 if t < start else level
        if start <= t < start + anneal:
            expected = level + (1 - start / 10 - level) * half_cosine((t - start) / anneal)
        ours = curves.swa_tail(t, curve=before, start=start, level=level, anneal=anneal)
        assert abs(ours - expected) <= 1e-12, t


@pytest.mark.parametrize(("curve", "naive"), WARMED, ids=map(name, WARMED))
def test_a_curve_stays_at_its_last_value_past_the_end(curve, naive):
    if naive is naive_inverse_sqrt:
        assert curve(10**6, total_steps=7, floor=0.25) == 0.25
        return
    last = {curve(t, total_steps=8, floor=0.25) for t in range(8, 50)}
    assert last == {1.0 if naive is naive_constant else curve(8, total_steps=8, floor=0.25)}
    if not name((curve, naive)).startswith(("constant", "step_decay")):
        assert last == {0.25}


@pytest.mark.parametrize("warmup", [1, 2, 2.5, 10])
@pytest.mark.parametrize(("curve", "naive"), WARMED, ids=map(name, WARMED))
def test_warmup_starts_at_one_part_and_never_at_zero(curve, naive, warmup):
    assert curve(0, total_steps=20, warmup=warmup) == 1 / warmup


def torch_factors(make, steps: int, kind=torch.optim.SGD, **settings) -> tuple[list[float], list[float]]:
    """The learning rates of a scheduler of torch, and the momentum."""
    optimizer = kind([torch.nn.Parameter(torch.ones(1))], lr=1.0, **settings)
    scheduler = make(optimizer)
    factors, momentum = [], []
    for _ in range(steps):
        (group,) = optimizer.param_groups
        factors.append(group["lr"])
        momentum.append(group["betas"][0] if "betas" in group else group["momentum"])
        optimizer.step()
        scheduler.step()
    return factors, momentum


def assert_near(ours, theirs):
    assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


@pytest.mark.parametrize("total", [1, 2, 3, 4, 7, 10, 11, 33, 100, 101])
@pytest.mark.parametrize(
    ("pct", "div", "final"), [(0.3, 25.0, 1e4), (0.15, 25.0, 1e4), (0.77, 25.0, 1e4), (0.3, 10.0, 50.0)]
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_one_cycle_and_its_momentum_equal_torch(total, pct, div, final, kind):
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    theirs = torch_factors(
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, 1.0, total, pct_start=pct, div_factor=div, final_div_factor=final, base_momentum=0.8
        ),
        total,
        kind,
        **momentum,
    )
    settings = {"total_steps": total, "warmup": pct * total}
    assert_near(
        [curves.one_cycle(t, **settings, start=1 / div, floor=1 / div / final) for t in range(total)], theirs[0]
    )
    assert_near([curves.one_cycle_momentum(t, **settings, low=0.8, high=0.95) for t in range(total)], theirs[1])


@pytest.mark.parametrize("total", [1, 2, 3, 10, 33])
def test_one_cycle_has_the_defaults_of_torch(total):
    theirs = torch_factors(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total), total, momentum=0.9)
    assert_near([curves.one_cycle(t, total_steps=total) for t in range(total)], theirs[0])
    assert_near([curves.one_cycle_momentum(t, total_steps=total) for t in range(total)], theirs[1])


@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize("total", [1, 2, 10, 101])
def test_cosine_equals_torch_up_to_the_end(total, floor):
    theirs, _ = torch_factors(partial(lr_scheduler.CosineAnnealingLR, T_max=total, eta_min=floor), total + 1)
    assert_near([curves.cosine(t, total_steps=total, floor=floor) for t in range(total + 1)], theirs)


@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize(("first", "growth", "cycles"), [(1, 1, 4), (7, 1, 3), (3, 2, 5), (4, 3, 6), (10, 2, 1)])
def test_cosine_restarts_equals_torch_up_to_the_end(first, growth, cycles, floor):
    total = first * sum(growth**n for n in range(cycles))
    restarts = partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=first, T_mult=growth, eta_min=floor)
    ours = partial(curves.cosine_restarts, total_steps=total, cycles=cycles, growth=growth, floor=floor)
    assert_near([ours(t) for t in range(total)], torch_factors(restarts, total)[0])


@pytest.mark.parametrize("total", [1, 2, 10, 101])
def test_linear_and_polynomial_equal_torch(total):
    for floor in (0.0, 0.05):
        line = partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=floor, total_iters=total)
        ours = [curves.linear(t, total_steps=total, floor=floor) for t in range(total + 10)]
        assert_near(ours, torch_factors(line, total + 10)[0])
    for power in (0.5, 0.9, 1, 3):
        theirs, _ = torch_factors(partial(lr_scheduler.PolynomialLR, total_iters=total, power=power), total + 10)
        assert_near([curves.polynomial(t, total_steps=total, power=power) for t in range(total + 10)], theirs)


@pytest.mark.parametrize("milestones", [[1], [3, 7], [2, 2, 9], [5, 40]])
@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_step_decay_equals_torch(milestones, gamma):
    theirs, _ = torch_factors(partial(lr_scheduler.MultiStepLR, milestones=milestones, gamma=gamma), 30)
    assert_near([curves.step_decay(t, total_steps=20, milestones=milestones, gamma=gamma) for t in range(30)], theirs)


@pytest.mark.parametrize("warmup", [1, 4, 10])
def test_warmup_equals_torchs_linear_rise(warmup):
    rise = partial(lr_scheduler.LinearLR, start_factor=1 / warmup, total_iters=warmup - 1)
    assert_near([curves.constant(t, warmup=warmup) for t in range(20)], torch_factors(rise, 20)[0])
