"""What a factory refuses, and how lengths become steps."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_tricks.schedules import (
    UnknownTotalSteps,
    constant,
    cosine_restarts,
    flat_cos,
    one_cycle,
    optimizer_steps,
    polynomial,
    step_decay,
    wsd,
)
from lightning_tricks.schedules.factories import whole_steps
from tests.nets import trainer
from tests.schedules.recording import Tiny, ones
from tests.schedules.test_factories import lrs_of, optimizer


def curve_of(factory, **settings):
    return factory(optimizer(), **{"total_steps": 10, **settings})["lr_scheduler"]["scheduler"].curve


@pytest.mark.parametrize(("warmup", "flat"), [(5, 4), (0.5, 0.4), (0.5, 4), (5, 0.4)])
def test_flat_cos_refuses_to_fall_before_its_warmup_ends(warmup, flat):
    message = rf"flat must not .* warmup ends at step 5, got flat={flat} \(step 4 of 10\): shorten the warmup"
    with pytest.raises(ValueError, match=message):
        curve_of(flat_cos, warmup=warmup, flat=flat)


@pytest.mark.parametrize(("warmup", "cooldown"), [(6, 5), (0.6, 0.5), (6, 0.5), (0.6, 5), (9, 0.2), (1, 1.0)])
def test_wsd_refuses_a_cooldown_within_its_warmup(warmup, cooldown):
    message = rf"warmup and cooldown must not overlap, got {warmup} and {cooldown} of 10 steps: shorten one of them"
    with pytest.raises(ValueError, match=message):
        curve_of(wsd, warmup=warmup, cooldown=cooldown)


@pytest.mark.parametrize(
    ("warmup", "milestones", "steps"),
    [
        (0, [7, 3], "7, 3"),
        (0, (0.5, 4), "5, 4"),
        (0, [0.7, 0.3], "7, 3"),
        (4, [3, 7], "3, 7"),
        (0.4, [0.3], "3"),
    ],
)
def test_step_decay_refuses_milestones_out_of_order(warmup, milestones, steps):
    message = rf"milestones must come in order and after the warmup, got .* \(steps {steps}\) and a .*: sort them"
    with pytest.raises(ValueError, match=message):
        curve_of(step_decay, warmup=warmup, milestones=milestones)


def test_lengths_that_meet_are_accepted():
    for total in range(1, 200):
        for share in range(101):
            warmup, rest = share / 100, float(1 - Fraction(share, 100))
            curve_of(wsd, total_steps=total, warmup=warmup, cooldown=rest)
            curve_of(flat_cos, total_steps=total, warmup=warmup, flat=warmup)
            curve_of(step_decay, total_steps=total, warmup=warmup, milestones=[warmup, warmup])
    curve_of(flat_cos, total_steps=100, warmup=29, flat=0.29)  # 0.29 of 100 is 28.999999999999996
    curve_of(step_decay, total_steps=100, warmup=29, milestones=[0.29])


def test_a_fraction_that_is_a_whole_number_of_steps_counts_as_that_number():
    for total in range(1, 500):
        for share in range(101):
            exact = Fraction(share * total, 100)
            steps = whole_steps(share / 100, total)
            assert steps == (exact if exact.denominator == 1 else pytest.approx(float(exact), rel=1e-15))


def test_a_milestone_given_as_a_fraction_is_not_a_step_late():
    curve = curve_of(step_decay, total_steps=25, milestones=[0.28])  # 0.28 of 25 is 7.000000000000001
    assert [curve(t) for t in (6, 7)] == [1.0, 0.1]


@pytest.mark.parametrize(
    ("factory", "settings", "error", "message"),
    [
        (flat_cos, {"flat": 11}, ValueError, r"flat must be at most total_steps=10, got 11"),
        (flat_cos, {"flat": None}, TypeError, r"flat must be an int .* got None"),
        (wsd, {"cooldown": 11}, ValueError, r"cooldown must be at most total_steps=10, got 11"),
        (wsd, {"cooldown": "1"}, TypeError, r"cooldown must be an int .* got '1'"),
        (wsd, {"cooldown": -0.1}, ValueError, r"cooldown must be .* got -0.1"),
        (wsd, {"shape": "sqrt"}, ValueError, r"shape must be one of .*, got 'sqrt'. Did you mean '1-sqrt'\?"),
        (wsd, {"shape": 1}, ValueError, r"shape must be one of '1-sqrt', 'linear', 'cosine', got 1"),
        (cosine_restarts, {"cycles": 0}, ValueError, r"cycles must be at least 1, got 0"),
        (cosine_restarts, {"cycles": 2.0}, TypeError, r"cycles must be a whole number, got 2.0"),
        (cosine_restarts, {"growth": 0.5}, ValueError, r"growth must be in \[1.0, inf\), got 0.5"),
        (cosine_restarts, {"growth": float("inf")}, ValueError, r"growth must be in \[1.0, inf\), got inf"),
        (polynomial, {"power": -1}, ValueError, r"power must be in \[0.0, inf\), got -1"),
        (polynomial, {"power": "2"}, TypeError, r"power must be a number .* got '2'"),
        (step_decay, {"gamma": 1.5}, ValueError, r"gamma must be in \[0.0, 1.0\], got 1.5"),
        (step_decay, {"milestones": 5}, TypeError, r"milestones must be a list of ints .* got 5"),
        (step_decay, {"milestones": "5"}, TypeError, r"milestones must be a list of ints .* got '5'"),
        (step_decay, {"milestones": [True]}, TypeError, r"milestones must be an int .* got True"),
        (step_decay, {"milestones": [1.5]}, ValueError, r"milestones must be an int .* got 1.5"),
        (one_cycle, {"start": 25}, ValueError, r"start must be in \[0.0, 1.0\], got 25"),
        (one_cycle, {"momentum": 0.9}, TypeError, r"momentum must be two numbers, .* got 0.9"),
        (one_cycle, {"momentum": (0.9,)}, TypeError, r"momentum must be two numbers, .* got \(0.9,\)"),
        (one_cycle, {"momentum": ()}, TypeError, r"momentum must be two numbers, .* got \(\)"),
        (one_cycle, {"momentum": "ab"}, TypeError, r"momentum must be two numbers, .* got 'ab'"),
        (one_cycle, {"momentum": (0.9, None)}, TypeError, r"momentum must be a number in \[0.0, 1.0\), got None"),
        (one_cycle, {"momentum": (0.9, 1.0)}, ValueError, r"momentum must be in \[0.0, 1.0\), got 1.0"),
        (one_cycle, {"momentum": (0.95, 0.85)}, ValueError, r"lowest first .* got \(0.95, 0.85\): swap them"),
        (one_cycle, {"momentum": (0.85, 0.95)}, ValueError, r"momentum can be cycled .* got SGD without: leave"),
    ],
)
def test_a_wrong_value_is_named_with_the_rule(factory, settings, error, message):
    mine = optimizer(0.5)
    with pytest.raises(error, match=message):
        factory(mine, total_steps=10, **settings)
    assert mine.param_groups[0]["lr"] == 0.5
    assert "initial_lr" not in mine.param_groups[0]


@pytest.mark.parametrize("total", [float("inf"), float("nan"), "10", -1, 0])
def test_a_total_that_is_no_count_is_refused(total):
    for factory in (constant, wsd):
        with pytest.raises((TypeError, ValueError), match=rf"total_steps must be .*, got {total!r}"):
            factory(optimizer(), total_steps=total)


NUMPY = {"warmup": np.float64(0.1), "floor": np.float64(0.01)}


@pytest.mark.parametrize(
    "make",
    [
        partial(constant, **NUMPY),
        partial(flat_cos, **NUMPY, flat=np.float64(0.5)),
        partial(wsd, **NUMPY, cooldown=np.float64(0.5)),
        partial(polynomial, **NUMPY, power=np.float64(2)),
        partial(cosine_restarts, **NUMPY, growth=np.float64(2)),
        partial(step_decay, **NUMPY, milestones=[np.float64(0.5), 8], gamma=np.float64(0.5)),
        partial(one_cycle, **NUMPY, start=np.float64(0.1), momentum=(np.float64(0.8), np.float64(0.9))),
    ],
    ids=lambda make: make.func.__name__,
)
def test_the_settings_are_plain_data_even_from_numpy(make, tmp_path):
    state = make(optimizer(momentum=0.9), total_steps=12)["lr_scheduler"]["scheduler"].state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state


def test_manual_optimization_needs_a_total():
    module = Tiny(flat_cos)
    module.automatic_optimization = False
    with pytest.raises(UnknownTotalSteps, match=r"automatic_optimization=False.*; pass total_steps="):
        trainer().fit(module, ones(4))


def test_manual_optimization_steps_a_schedule_of_a_given_total():
    class Manual(Tiny):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()
            self.lr_schedulers().step()

    module = Manual(lambda optimizer, module: step_decay(optimizer, total_steps=8, milestones=[2, 0.5], gamma=0.5))
    trainer().fit(module, ones(4))
    assert module.optimizer.lrs == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]


def test_a_module_tells_the_total_of_its_fit():
    totals = []

    def schedule(optimizer, module):
        totals.append(optimizer_steps(module.trainer))
        return wsd(optimizer, module, warmup=0.25, cooldown=0.25, shape="linear")

    module = Tiny(schedule)
    trainer(max_epochs=4, accumulate_grad_batches=2).fit(module, ones(3))
    assert totals == [8]
    assert module.optimizer.lrs == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]


def test_milestones_are_taken_over_and_not_kept():
    milestones = [2, 5]
    schedule = step_decay(optimizer(), total_steps=10, milestones=milestones, gamma=0.5)
    milestones.clear()
    taken = [lr for (lr,) in lrs_of(schedule, 8)]
    assert taken == [1.0] * 2 + [0.5] * 3 + [0.25] * 3
    assert all(later <= before for before, later in pairwise(taken))


LONG = [
    lambda optimizer, module: flat_cos(optimizer, module, warmup=500, flat=900),
    lambda optimizer, module: wsd(optimizer, module, warmup=500, cooldown=200),
    lambda optimizer, module: wsd(optimizer, module, warmup=500, cooldown=0.5),
    lambda optimizer, module: step_decay(optimizer, module, warmup=500, milestones=[600, 0.5]),
    lambda optimizer, module: one_cycle(optimizer, module, warmup=500),
]


@pytest.mark.parametrize("schedule", LONG)
@pytest.mark.parametrize("settings", [{"fast_dev_run": True}, {"fast_dev_run": 3}, {"overfit_batches": 2}])
def test_steps_longer_than_a_trial_of_the_training_end_with_it(schedule, settings):
    module = Tiny(schedule)
    run = trainer(**settings)
    run.fit(module, ones(8))
    assert len(module.optimizer.lrs) == run.global_step
    with pytest.raises(ValueError, match="warmup must be at most total_steps=16, got 500"):
        trainer().fit(Tiny(schedule), ones(8))


def test_a_trial_keeps_fractions_and_a_given_total_as_they_are():
    schedules = [
        (r"warmup and cooldown", lambda optimizer, module: wsd(optimizer, module, warmup=0.6, cooldown=0.6)),
        (r"warmup must be at most", lambda optimizer, module: wsd(optimizer, module, total_steps=4, warmup=5)),
    ]
    for message, schedule in schedules:
        with pytest.raises(ValueError, match=message):
            trainer(fast_dev_run=True).fit(Tiny(schedule), ones(8))
