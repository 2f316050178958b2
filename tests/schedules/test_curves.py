"""Every curve equals its formula, written naively here, and torch's schedulers where torch has it."""

from __future__ import annotations

from fractions import Fraction
from functools import cache, partial
from itertools import pairwise, product
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


@cache
def restart_bounds(T, W, cycles, growth):
    W, growth = exact(W), exact(growth)
    unit = (T - W) / sum(growth**n for n in range(cycles))
    return [W + unit * sum(growth**n for n in range(cycle)) for cycle in range(cycles + 1)]


def naive_restarts(t, T, W, floor, cycles=3, growth=1):
    if t >= T:
        return floor
    for start, end in pairwise(restart_bounds(T, W, cycles, growth)):
        if start <= t < end:
            return floor + (1 - floor) * half_cosine(float((t - start) / (end - start)))
    raise AssertionError(t)


def naive_one_cycle(t, T, W, floor, initial=0.04):
    if t < W - 1:
        return initial + (1 - initial) * (1 - cos(pi * t / (W - 1))) / 2
    return floor if t >= T - 1 else floor + (1 - floor) * half_cosine((t - W + 1) / (T - W))


# For each curve its naive form, and settings of both: those of the curve by its own names, the others as they are.
CYCLES = [(1, 1), (2, 1.0), (2, 2), (3, 2.0), (4, 1.5), (3, 3), (7, 1)]
CURVES = {
    "constant": (naive_constant, [{}]),
    "linear": (naive_linear, [{}]),
    "cosine": (naive_cosine, [{}]),
    "flat_cos": (naive_flat_cos, [{}, {"flat": 1}, {"flat": 2.5}]),
    "polynomial": (naive_polynomial, [{}, {"power": 2}, {"power": 0.5}]),
    "inverse_sqrt": (naive_inverse_sqrt, [{}]),
    "wsd": (
        naive_wsd,
        [{}, {"cooldown": 1}, {"cooldown": 0}]
        + [{"shape": shape} for shape in curves.COOLDOWNS]
        + [{"cooldown": 2.5, "shape": shape} for shape in curves.COOLDOWNS],
    ),
    "step_decay": (naive_step_decay, [{}, {"gamma": 0.5}, {"milestones": (3, 3, 7.5)}, {"milestones": ()}]),
    "cosine_restarts": (naive_restarts, [{}, *({"cycles": number, "growth": growth} for number, growth in CYCLES)]),
}
SYMBOLS = {"flat": "F", "cooldown": "C"}  # the names of settings in the naive forms


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_equals_its_formula_at_every_step_and_past_the_end(name):
    curve, (naive, variants) = getattr(curves, name), CURVES[name]
    for settings, warmup, floor in product(variants, [0, 1, 3, 2.5, 0.4], [0.0, 0.1]):
        symbols = {SYMBOLS.get(setting, setting): value for setting, value in settings.items()}
        for total in (1, 2, 3, 4, 5, 7, 10, 25, 60):
            for t in range(total + 11):
                case = settings, warmup, floor, total, t
                expected = min(1.0, (t + 1) / warmup) if t < warmup else naive(t, total, warmup, floor, **symbols)
                ours = curve(t, total_steps=total, warmup=warmup, floor=floor, **settings)
                assert abs(ours - expected) <= 1e-12, case
                assert 0 < ours <= 1 if t == 0 and warmup else 0 <= ours <= 1, case


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_stays_at_its_last_value_past_the_end(name):
    for settings in CURVES[name][1]:
        curve = partial(getattr(curves, name), **settings)
        if name == "inverse_sqrt":
            assert curve(10**6, total_steps=7, floor=0.25) == 0.25
            continue
        last = {curve(t, total_steps=8, floor=0.25) for t in range(8, 50)}
        assert last == {1.0 if name == "constant" else curve(8, total_steps=8, floor=0.25)}, settings
        assert last == {0.25} or name in ("constant", "step_decay"), settings


def test_warmup_starts_at_one_part_and_never_at_zero():
    for name, (_, variants) in CURVES.items():
        for settings, warmup in product(variants, [1, 2, 2.5, 10]):
            assert getattr(curves, name)(0, total_steps=20, warmup=warmup, **settings) == 1 / warmup, (name, settings)


def test_one_cycle_equals_its_formula():
    ends = [(0.04, 4e-6), (0.5, 0.0), (0.0, 0.25), (1.0, 1.0)]
    for warmup, (initial, floor) in product([0, 1, 2, 2.5, 11], ends):
        for total in range(max(1, int(warmup + 1)), 61):
            for t in range(total + 11):
                case = warmup, initial, floor, total, t
                ours = curves.one_cycle(t, total_steps=total, warmup=warmup, initial=initial, floor=floor)
                assert abs(ours - naive_one_cycle(t, total, warmup, floor, initial)) <= 1e-12, case
                assert 0 <= ours <= 1, case
                momentum = curves.one_cycle_momentum(t, total_steps=total, warmup=warmup, low=0.25, high=0.75)
                assert abs(momentum - (0.75 - 0.5 * naive_one_cycle(t, total, warmup, 0, 0))) <= 1e-12, case


def test_every_restart_begins_at_one_however_its_length_is_rounded():
    for cycles, growth, unit in product(range(1, 12), [1, 2, 3], range(1, 40)):
        starts = [unit * sum(growth**n for n in range(cycle)) for cycle in range(cycles + 1)]
        settings = {"total_steps": starts.pop(), "cycles": cycles, "growth": growth}
        assert {curves.cosine_restarts(start, **settings) for start in starts} == {1.0}, settings


def test_swa_tail_equals_its_formula():
    before = partial(curves.linear, total_steps=10)
    for anneal, start, level in product([0, 1, 2.5, 6], [0, 4, 4.5, 10], [0.0, 0.25, 2.0]):
        for t in range(30):
            expected = 1 - t / 10 if t < start else level
            if start <= t < start + anneal:
                expected = level + (1 - start / 10 - level) * half_cosine((t - start) / anneal)
            ours = curves.swa_tail(t, curve=before, start=start, level=level, anneal=anneal)
            assert abs(ours - expected) <= 1e-12, (anneal, start, level, t)


# -- torch's schedulers -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_one_cycle_and_its_momentum_equal_torch(kind):
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    shapes = [(0.3, 25.0, 1e4), (0.15, 25.0, 1e4), (0.77, 25.0, 1e4), (0.3, 10.0, 50.0)]
    for total, (share, div, final) in product([1, 2, 3, 4, 7, 10, 11, 33, 100, 101], shapes):
        theirs = partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=total, base_momentum=0.8)
        theirs = partial(theirs, pct_start=share, div_factor=div, final_div_factor=final)
        factors, momenta = torch_factors(theirs, total, kind, **momentum)
        ours = partial(curves.one_cycle, total_steps=total, warmup=share * total)
        assert_near([ours(t, initial=1 / div, floor=1 / div / final) for t in range(total)], factors)
        ours = partial(curves.one_cycle_momentum, total_steps=total, warmup=share * total)
        assert_near([ours(t, low=0.8, high=0.95) for t in range(total)], momenta)


def test_one_cycle_has_the_defaults_of_torch():
    for total in (1, 2, 3, 10, 33):
        theirs = partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=total)
        factors, momenta = torch_factors(theirs, total, momentum=0.9)
        assert_near([curves.one_cycle(t, total_steps=total) for t in range(total)], factors)
        assert_near([curves.one_cycle_momentum(t, total_steps=total) for t in range(total)], momenta)


def test_cosine_equals_torch_up_to_the_end():
    for total, floor in product([1, 2, 10, 101], [0.0, 0.05]):
        theirs, _ = torch_factors(partial(lr_scheduler.CosineAnnealingLR, T_max=total, eta_min=floor), total + 1)
        assert_near([curves.cosine(t, total_steps=total, floor=floor) for t in range(total + 1)], theirs)


def test_cosine_restarts_equals_torch_up_to_the_end():
    shapes = [(1, 1, 4), (7, 1, 3), (3, 2, 5), (4, 3, 6), (10, 2, 1)]
    for (first, growth, cycles), floor in product(shapes, [0.0, 0.05]):
        total = first * sum(growth**n for n in range(cycles))
        restarts = partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=first, T_mult=growth, eta_min=floor)
        ours = partial(curves.cosine_restarts, total_steps=total, cycles=cycles, growth=growth, floor=floor)
        assert_near([ours(t) for t in range(total)], torch_factors(restarts, total)[0])


def test_linear_and_polynomial_equal_torch():
    for total in (1, 2, 10, 101):
        for floor in (0.0, 0.05):
            line = partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=floor, total_iters=total)
            ours = [curves.linear(t, total_steps=total, floor=floor) for t in range(total + 10)]
            assert_near(ours, torch_factors(line, total + 10)[0])
        for power in (0.5, 0.9, 1, 3):
            theirs, _ = torch_factors(partial(lr_scheduler.PolynomialLR, total_iters=total, power=power), total + 10)
            assert_near([curves.polynomial(t, total_steps=total, power=power) for t in range(total + 10)], theirs)


def test_step_decay_equals_torch():
    for milestones, gamma in product([[1], [3, 7], [2, 2, 9], [5, 40]], [0.1, 0.5]):
        theirs, _ = torch_factors(partial(lr_scheduler.MultiStepLR, milestones=milestones, gamma=gamma), 30)
        ours = partial(curves.step_decay, total_steps=20, milestones=milestones, gamma=gamma)
        assert_near([ours(t) for t in range(30)], theirs)


def test_warmup_equals_torchs_linear_rise():
    for warmup in (1, 4, 10):
        rise = partial(lr_scheduler.LinearLR, start_factor=1 / warmup, total_iters=warmup - 1)
        assert_near([curves.constant(t, warmup=warmup) for t in range(20)], torch_factors(rise, 20)[0])
