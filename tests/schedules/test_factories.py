"""What the factories return, what they refuse, and the learning rates of a real fit."""

from __future__ import annotations

import re
from copy import deepcopy
from fractions import Fraction
from functools import partial
from inspect import isfunction, signature
from itertools import product
from math import cos, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from lightning_tricks import schedules
from lightning_tricks.schedules import (
    CurveLR,
    UnknownTotalSteps,
    constant,
    cosine,
    cosine_restarts,
    flat_cos,
    inverse_sqrt,
    linear,
    one_cycle,
    optimizer_steps,
    polynomial,
    reduce_on_plateau,
    step_decay,
    swa_tail,
    wsd,
)
from lightning_tricks.schedules.arguments import whole_steps
from tests.nets import Net, SteppedByHand, build, fit, loader, trainer
from tests.refusals import assert_refused
from tests.schedules.recording import FACTORIES, FALLING, Tiny, lrs_of, ones, optimizer, scheduler_of


def curve_of(factory: Any, **settings: Any) -> Any:
    return scheduler_of(factory(optimizer(), **{"total_steps": 10, **settings})).curve


# -- what they return -------------------------------------------------------------------------------------------------


def test_every_curve_has_its_factory():
    curves = {name for name, value in vars(schedules.curves).items() if isfunction(value) and name[0] != "_"}
    factories = {factory.__name__ for factory in [*FACTORIES, swa_tail]}
    assert factories == curves - {"one_cycle_momentum"}
    assert factories < set(schedules.__all__)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_factory_returns_all_that_lightning_wants(factory):
    mine = optimizer()
    schedule = factory(mine, total_steps=40)
    scheduler = schedule["lr_scheduler"].pop("scheduler")
    assert schedule == {"optimizer": mine, "lr_scheduler": {"interval": "step", "frequency": 1}}
    assert schedule["optimizer"] is scheduler.optimizer is mine
    assert isinstance(scheduler, CurveLR)
    curve = getattr(schedules.curves, factory.__name__)  # with the same defaults
    assert [scheduler.curve(t) for t in range(60)] == [curve(t, total_steps=40) for t in range(60)]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_each_group_follows_the_curve_from_its_own_base(factory, wrap):
    mine = optimizer(*map(wrap, (0.5, 0.125)), kind=torch.optim.AdamW, foreach=False)
    schedule = factory(mine, total_steps=10, warmup=3)
    factors = [scheduler_of(schedule).curve(t) for t in range(14)]
    expected = torch.tensor([[0.5 * factor, 0.125 * factor] for factor in factors], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(lrs_of(schedule, 14)).double(), expected, atol=1e-7, rtol=0)
    assert all(isinstance(group["lr"], torch.Tensor) == (wrap is torch.tensor) for group in mine.param_groups)


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_a_groups_max_lr_and_lr_scale_are_its_own_base(factory, wrap):
    mine = optimizer(*map(wrap, (0.5, 0.5, 0.5, 0.5)), kind=torch.optim.AdamW, foreach=False)
    mine.param_groups[1]["max_lr"] = wrap(0.25)
    mine.param_groups[2]["lr_scale"] = 0.125
    mine.param_groups[3].update(max_lr=wrap(2.0), lr_scale=0.5)
    schedule = factory(mine, total_steps=10, warmup=3)
    lrs_of(schedule, 4)
    added = {"lr": wrap(7.0), "max_lr": wrap(4.0), "lr_scale": 0.5}
    mine.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **added})
    scheduler_of(schedule).step()
    factors = [scheduler_of(schedule).curve(t) for t in range(5, 14)]
    expected = torch.tensor([[base * f for base in (0.5, 0.25, 0.0625, 1.0, 2.0)] for f in factors]).double()
    torch.testing.assert_close(torch.tensor(lrs_of(schedule, 9)).double(), expected, atol=1e-6, rtol=0)
    assert all(isinstance(group["lr"], torch.Tensor) == (wrap is torch.tensor) for group in mine.param_groups)


def test_a_group_added_later_follows_the_curve_from_its_own_base():
    for wrap in (float, torch.tensor):
        mine = optimizer(wrap(1.0), kind=torch.optim.AdamW, foreach=False)
        schedule = linear(mine, total_steps=8)
        lrs_of(schedule, 2)
        mine.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": wrap(0.5)})
        assert lrs_of(schedule, 4) == [[0.75, 0.5], [0.625, 0.3125], [0.5, 0.25], [0.375, 0.1875]]


def test_the_settings_are_plain_data_even_from_numpy(tmp_path):
    common = {"warmup": np.float64(0.1), "floor": np.float64(0.01)}
    cycle = {"initial": np.float64(0.1), "momentum": (np.float64(0.8), np.float64(0.9))}
    for factory, settings in [
        (constant, {}),
        (flat_cos, {"flat": np.float64(0.5)}),
        (wsd, {"cooldown": np.float64(0.5)}),
        (polynomial, {"power": np.float64(2)}),
        (cosine_restarts, {"growth": np.float64(2)}),
        (step_decay, {"milestones": [np.float64(0.5), 8], "gamma": np.float64(0.5)}),
        (one_cycle, cycle),
    ]:
        state = scheduler_of(factory(optimizer(momentum=0.9), total_steps=12, **common, **settings)).state_dict()
        torch.save(state, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == state


# -- durations --------------------------------------------------------------------------------------------------------


def test_a_fraction_is_the_same_as_its_steps():
    by_fraction = lrs_of(flat_cos(optimizer(), total_steps=40, warmup=0.1, flat=0.5), 50)
    assert by_fraction == lrs_of(flat_cos(optimizer(), total_steps=40, warmup=4, flat=20), 50)


def test_a_whole_float_is_a_fraction_and_a_whole_int_is_steps():
    assert lrs_of(linear(optimizer(), total_steps=4, warmup=1.0), 4) == [[0.25], [0.5], [0.75], [1.0]]
    assert lrs_of(linear(optimizer(), total_steps=4, warmup=1), 3) == [[1.0], [1.0], [1 - 1 / 3]]


def test_a_fraction_that_is_a_whole_number_of_steps_counts_as_that_number():
    for total, share in product(range(1, 500), range(101)):
        exact = Fraction(share * total, 100)
        steps = whole_steps(share / 100, total)
        assert steps == (exact if exact.denominator == 1 else pytest.approx(float(exact), rel=1e-15))
    curve = curve_of(step_decay, total_steps=25, milestones=[0.28])  # 0.28 of 25 is 7.000000000000001
    assert [curve(t) for t in (6, 7)] == [1.0, 0.1]


def test_lengths_that_meet_are_accepted():
    for total, share in product([*range(1, 12), 25, 30, 49, 64, 99, 100, 150, 199], range(101)):
        warmup, rest = share / 100, float(1 - Fraction(share, 100))
        curve_of(wsd, total_steps=total, warmup=warmup, cooldown=rest)
        curve_of(flat_cos, total_steps=total, warmup=warmup, flat=warmup)
        curve_of(step_decay, total_steps=total, warmup=warmup, milestones=[warmup, warmup])
    curve_of(flat_cos, total_steps=100, warmup=29, flat=0.29)  # 0.29 of 100 is 28.999999999999996
    curve_of(step_decay, total_steps=100, warmup=29, milestones=[0.29])
    curve_of(step_decay, total_steps=100, milestones=[30, 160])  # never reached


def test_phases_out_of_order_are_refused():
    rules = {
        "flat": "lie between the end of the warmup and total_steps",
        "cooldown": "fit between the end of the warmup and total_steps",
        "milestones": "come in order, after the end of the warmup",
    }
    orders: list[tuple[Any, str, Any, Any, str, int]] = [
        *((flat_cos, "flat", flat, warmup, "4", 5) for flat, warmup in product([4, 0.4], [5, 0.5])),
        (flat_cos, "flat", 11, 0, "11", 0),
        *((wsd, "cooldown", cooldown, warmup, "5", 6) for cooldown, warmup in product([5, 0.5], [6, 0.6])),
        (wsd, "cooldown", 0.2, 9, "2", 9),
        (wsd, "cooldown", 1.0, 1, "10", 1),
        (wsd, "cooldown", 11, 0, "11", 0),
        (step_decay, "milestones", [7, 3], 0, "7, 3", 0),
        (step_decay, "milestones", (0.5, 4), 0, "5, 4", 0),
        (step_decay, "milestones", [0.7, 0.3], 0, "7, 3", 0),
        (step_decay, "milestones", [3, 7], 4, "3, 7", 4),
        (step_decay, "milestones", [0.3], 0.4, "3", 4),
    ]
    for factory, name, value, warmup, steps, warmup_steps in orders:
        rule = rf"{name} must {rules[name]}, got {re.escape(repr(value))} \({steps} of 10 steps\): "
        remedy = rf"shorten the warmup, which takes {warmup_steps} steps, or change {name}\.$"
        with pytest.raises(ValueError, match=rule + remedy):
            curve_of(factory, warmup=warmup, **{name: value})


def test_milestones_are_taken_over_and_not_kept():
    milestones = [2, 5]
    schedule = step_decay(optimizer(), total_steps=10, milestones=milestones, gamma=0.5)
    milestones.clear()
    assert [lr for (lr,) in lrs_of(schedule, 8)] == [1.0] * 2 + [0.5] * 3 + [0.25] * 3


# -- what they refuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_error_names_the_argument_the_value_and_what_is_allowed(factory):
    cases = [
        (ValueError, {"warmup": -1}, r"warmup must be an int >= 0 \(steps\) or a float in \[0, 1\] .*got -1"),
        (ValueError, {"warmup": 1.5}, r"warmup must be .* a float in \[0, 1\] .*got 1.5"),
        (ValueError, {"warmup": float("nan")}, r"warmup must be .* got nan"),
        (TypeError, {"warmup": True}, r"warmup must be an int .*or a float .*got True"),
        (TypeError, {"warmup": "5"}, r"warmup must be an int .*or a float .*got '5'"),
        (ValueError, {"warmup": 11}, r"warmup must be at most total_steps, got 11 \(11 of 10 steps\): shorten the w"),
        (ValueError, {"warmup": 10**400}, r"warmup must be at most total_steps, got 1000"),
        (ValueError, {"floor": 2}, r"floor must be in \[0.0, 1.0\], got 2"),
        (ValueError, {"floor": -0.1}, r"floor must be in \[0.0, 1.0\], got -0.1"),
        (TypeError, {"floor": None}, r"floor must be a number in \[0.0, 1.0\], got None"),
        (ValueError, {"total_steps": 0}, r"total_steps must be at least 1, got 0"),
        (ValueError, {"total_steps": -1}, r"total_steps must be at least 1, got -1"),
        (TypeError, {"total_steps": True}, r"total_steps must be an integer, got True"),
        (TypeError, {"total_steps": "10"}, r"total_steps must be an integer, got '10'"),
        (TypeError, {"total_steps": 10.0}, r"total_steps must be an integer, got 10.0"),
        (TypeError, {"total_steps": float("inf")}, r"total_steps must be an integer, got inf"),
        (TypeError, {"total_steps": float("nan")}, r"total_steps must be an integer, got nan"),
    ]
    assert_refused(lambda **settings: factory(optimizer(), **{"total_steps": 10, **settings}), cases)


def test_a_wrong_value_is_named_with_the_rule_and_leaves_the_optimizer_alone():
    wrong = {
        flat_cos: [
            (TypeError, {"flat": None}, r"flat must be an int .* got None"),
            (ValueError, {"warmup": 11}, r"warmup must be at most total_steps"),
        ],
        wsd: [
            (TypeError, {"cooldown": "1"}, r"cooldown must be an int .* got '1'"),
            (ValueError, {"cooldown": -0.1}, r"cooldown must be .* got -0.1"),
            (ValueError, {"shape": "sqrt"}, r"shape must be one of .*, got 'sqrt'. Did you mean '1-sqrt'\?"),
            (ValueError, {"shape": 1}, r"shape must be one of '1-sqrt', 'linear', 'cosine', got 1"),
        ],
        cosine_restarts: [
            (ValueError, {"cycles": 0}, r"cycles must be at least 1, got 0"),
            (TypeError, {"cycles": 2.0}, r"cycles must be an integer, got 2.0"),
            (ValueError, {"cycles": 1001}, r"cycles must be at most 1000, .* got cycles=1001, growth=1.0"),
            (ValueError, {"growth": 1e300}, r"growth\*\*cycles a number, got cycles=3, growth=1e\+300"),
            (ValueError, {"growth": 0.5}, r"growth must be in \[1.0, inf\), got 0.5"),
            (ValueError, {"growth": float("inf")}, r"growth must be in \[1.0, inf\), got inf"),
        ],
        polynomial: [
            (ValueError, {"power": -1}, r"power must be in \[0.0, inf\), got -1"),
            (TypeError, {"power": "2"}, r"power must be a number .* got '2'"),
        ],
        step_decay: [
            (ValueError, {"gamma": 1.5}, r"gamma must be in \[0.0, 1.0\], got 1.5"),
            (TypeError, {"milestones": 5}, r"milestones must be a list of ints .* got 5"),
            (TypeError, {"milestones": "5"}, r"milestones must be a list of ints .* got '5'"),
            (TypeError, {"milestones": [True]}, r"milestones must be an int .* got True"),
            (ValueError, {"milestones": [1.5]}, r"milestones must be an int .* got 1.5"),
        ],
        one_cycle: [
            (ValueError, {"initial": 25}, r"initial must be in \[0.0, 1.0\], got 25"),
            (TypeError, {"momentum": 0.9}, r"momentum must be two numbers, .* got 0.9"),
            (TypeError, {"momentum": (0.9,)}, r"momentum must be two numbers, .* got \(0.9,\)"),
            (TypeError, {"momentum": ()}, r"momentum must be two numbers, .* got \(\)"),
            (TypeError, {"momentum": "ab"}, r"momentum must be two numbers, .* got 'ab'"),
            (TypeError, {"momentum": (0.9, None)}, r"momentum must be a number in \[0.0, 1.0\), got None"),
            (ValueError, {"momentum": (0.9, 1.0)}, r"momentum must be in \[0.0, 1.0\), got 1.0"),
            (ValueError, {"momentum": (0.95, 0.85)}, r"lowest first .* got \(0.95, 0.85\): swap them"),
            (ValueError, {"momentum": (0.85, 0.95)}, r"momentum can be cycled .* got SGD without: leave"),
        ],
    }
    for factory, cases in wrong.items():
        mine = optimizer(0.5)
        assert_refused(partial(factory, mine, total_steps=10), cases)
        assert mine.param_groups[0]["lr"] == 0.5
        assert "initial_lr" not in mine.param_groups[0]


def test_arguments_in_the_wrong_order_are_named():
    with pytest.raises(TypeError, match="optimizer must be a torch Optimizer"):
        flat_cos(build(), optimizer())
    with pytest.raises(TypeError, match="module must be a LightningModule, got Linear"):
        flat_cos(optimizer(), torch.nn.Linear(1, 1))


# -- the number of steps ----------------------------------------------------------------------------------------------


def test_without_a_total_that_can_be_counted_the_error_says_what_to_pass():
    for factory in FALLING:
        with pytest.raises(UnknownTotalSteps, match=r"neither module nor total_steps.*; pass total_steps="):
            factory(optimizer())
    with pytest.raises(UnknownTotalSteps, match=r"no Trainer yet .*configure_optimizers.*; pass total_steps="):
        flat_cos(optimizer(), Tiny())
    module = Tiny(flat_cos)
    module.automatic_optimization = False
    with pytest.raises(UnknownTotalSteps, match=r"automatic_optimization=False.*; pass total_steps="):
        trainer().fit(module, ones(4))


def test_an_endless_curve_needs_no_total_unless_its_warmup_is_a_fraction():
    assert lrs_of(constant(optimizer(), warmup=2), 4) == [[0.5], [1.0], [1.0], [1.0]]
    assert lrs_of(inverse_sqrt(optimizer(), Tiny(), warmup=4), 16)[3::12] == [[1.0], [0.5]]
    for factory in (constant, inverse_sqrt):
        assert scheduler_of(factory(optimizer())).settings["total_steps"] is None
        with pytest.raises(UnknownTotalSteps):
            factory(optimizer(), warmup=0.5)


def test_manual_optimization_steps_a_schedule_of_a_given_total():
    class Manual(SteppedByHand, Tiny):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
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


SETTINGS = {"milestones": [2, 0.5], "warmup": 1, "cooldown": 0.5, "cycles": 2, "power": 2, "floor": 0.01}
FITS = [
    ({"max_epochs": 3, "accumulate_grad_batches": 2}, 9),  # the third window of an epoch is ragged
    ({"max_epochs": 3, "accumulate_grad_batches": 2, "max_steps": 7}, 7),
    ({"max_epochs": -1, "max_steps": 11}, 11),
    ({"max_epochs": 2, "limit_train_batches": 3}, 6),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_fit_takes_the_curve_to_its_last_value(factory):
    taken = {name: SETTINGS[name] for name in signature(factory).parameters.keys() & SETTINGS}
    for settings, steps in FITS:
        module = Tiny(lambda optimizer, module: factory(optimizer, module, **taken))
        run = trainer(**settings)
        run.fit(module, ones(5))
        scheduler = run.lr_scheduler_configs[0].scheduler
        assert scheduler.settings["total_steps"] == (None if factory in (constant, inverse_sqrt) else steps)
        assert module.optimizer.lrs == [scheduler.curve(t) for t in range(steps)]
        assert module.optimizer.param_groups[0]["lr"] == scheduler.curve(steps)
        if factory in FALLING:
            assert scheduler.curve(steps) == (0.01 if factory is not step_decay else pytest.approx(0.01))


def test_a_second_fit_of_one_trainer_goes_on_in_the_longer_plan():
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            return linear(super().configure_optimizers(), self)

    module = build(Scheduled)
    run = fit(module, max_epochs=2)
    assert run.optimizers[0].param_groups[0]["lr"] == 0
    run.fit_loop.max_epochs = 4
    run.fit(module, loader(), loader(24))
    assert run.lr_scheduler_configs[0].scheduler.settings["total_steps"] == 24
    assert run.optimizers[0].param_groups[0]["lr"] == 0


LONG = [(flat_cos, {"flat": 900}), (wsd, {"cooldown": 200}), (wsd, {"cooldown": 0.5}), (one_cycle, {})]
LONG += [(step_decay, {"milestones": [600, 0.5]})]


@pytest.mark.parametrize("settings", [{"fast_dev_run": True}, {"fast_dev_run": 3}, {"overfit_batches": 2}])
def test_steps_longer_than_a_trial_of_the_training_end_with_it(settings):
    for factory, lengths in LONG:
        make = partial(factory, warmup=500, **lengths)
        module = Tiny(make)
        run = trainer(**settings)
        run.fit(module, ones(8))
        assert len(module.optimizer.lrs) == run.global_step
        if factory is not one_cycle:
            assert module.optimizer.lrs[-1] == 1.0  # the warm-up ends with the trial
        with pytest.raises(ValueError, match=r"warmup must be at most total_steps, got 500 \(500 of 16 steps\)"):
            trainer().fit(Tiny(make), ones(8))


def test_a_trial_keeps_fractions_and_a_given_total_as_they_are():
    schedules = {
        "cooldown must fit": lambda optimizer, module: wsd(optimizer, module, warmup=0.6, cooldown=0.6),
        "warmup must be at most": lambda optimizer, module: wsd(optimizer, module, total_steps=4, warmup=5),
    }
    for message, schedule in schedules.items():
        with pytest.raises(ValueError, match=message):
            trainer(fast_dev_run=True).fit(Tiny(schedule), ones(8))


# -- single curves ----------------------------------------------------------------------------------------------------


def test_flat_cos_is_exact_in_every_step_of_a_fit():
    for accumulation in (1, 3):
        module = Tiny(lambda optimizer, module: flat_cos(optimizer, module, warmup=0.1, flat=0.6, floor=0.01), lr=1.0)
        trainer(max_epochs=4, accumulate_grad_batches=accumulation).fit(module, ones(13))
        T = 4 * -(-13 // accumulation)
        W, F = 0.1 * T, 0.6 * T
        expected = [
            (t + 1) / W if t < W else 1.0 if t <= F else 0.01 + 0.99 * (1 + cos(pi * (t - F) / (T - F))) / 2
            for t in range(T)
        ]
        assert module.optimizer.lrs == pytest.approx([min(1.0, factor) for factor in expected], rel=0, abs=1e-12)
        assert float(module.optimizer.param_groups[0]["lr"]) == pytest.approx(0.01, abs=1e-12)


def test_wsd_warms_up_stays_and_falls_in_its_shape():
    falls = {"1-sqrt": lambda p: 1 - sqrt(p), "linear": lambda p: 1 - p, "cosine": lambda p: (1 + cos(pi * p)) / 2}
    for (shape, fall), (cooldown, C) in product(falls.items(), [(0.2, 4), (6, 6), (0.5, 10), (1, 1), (0, 0)]):
        schedule = wsd(optimizer(0.5), total_steps=20, warmup=0.2, cooldown=cooldown, shape=shape, floor=0.1)
        expected = [0.25, 0.5, 0.75, *[1.0] * (17 - C), *(0.1 + 0.9 * fall(p / C) for p in range(C + 1) if C)]
        expected += [1.0] * (20 - len(expected)) + [0.1] * (25 - max(20, len(expected)))
        assert [lr for (lr,) in lrs_of(schedule, 25)] == pytest.approx([0.5 * f for f in expected], rel=0, abs=1e-12)


def test_the_highest_learning_rate_of_one_cycle_is_the_optimizers():
    assert max(lrs_of(one_cycle(optimizer(0.3), total_steps=10), 10)) == [0.3]


def momentum_of(group: dict[str, Any]) -> float:
    return group["betas"][0] if "betas" in group else group["momentum"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_one_cycle_moves_the_momentum_as_torch_does(kind):
    settings = {"betas": (0.9, 0.99)} if kind.__name__.startswith("Adam") else {"momentum": 0.9}
    for pair in [(0.85, 0.95), [0.0, 0.5], (0.9, 0.9)]:
        ours, theirs = (optimizer(0.5, 0.25, kind=kind, **settings) for _ in range(2))
        mine = scheduler_of(one_cycle(ours, total_steps=20, momentum=pair))
        low, high = pair
        torchs = OneCycleLR(theirs, [0.5, 0.25], 20, base_momentum=low, max_momentum=high)
        for step in range(20):
            for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
                assert a["lr"] == pytest.approx(b["lr"], rel=0, abs=1e-12)
                assert momentum_of(a) == pytest.approx(momentum_of(b), rel=0, abs=1e-12)
                assert "betas" not in a or a["betas"][1:] == (0.99,)
            ours.step()
            theirs.step()
            mine.step()
            if step < 19:
                torchs.step()
        assert {momentum_of(group) for group in ours.param_groups} == {high}


def test_one_cycle_leaves_momentum_alone_unless_asked():
    mine = optimizer(momentum=0.7)
    lrs_of(one_cycle(mine, total_steps=5), 5)
    assert mine.param_groups[0]["momentum"] == 0.7


def test_a_group_that_joins_takes_the_momentum_of_the_cycle():
    mine = optimizer(momentum=0.9)
    scheduler = scheduler_of(one_cycle(mine, total_steps=10, momentum=(0.8, 0.95)))
    mine.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "momentum": 0.1})
    mine.step()
    scheduler.step()
    assert momentum_of(mine.param_groups[0]) == momentum_of(mine.param_groups[1]) == scheduler.momentum(1)


# -- the tail for averaging -------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("factory", FACTORIES)
def test_the_tail_goes_behind_every_curve_with_its_groups(factory):
    for start, anneal in product([12, 0.6], [0, 3, 0.1]):

        def make(start: Any = start, anneal: Any = anneal) -> Any:
            return swa_tail(factory(optimizer(0.5, 0.125), total_steps=20), start=start, swa_lr=0.05, anneal=anneal)

        schedule, S, A = make(), 12, 2 if anneal == 0.1 else anneal
        before = curve_of(factory, total_steps=20)
        expected = []
        for t in range(25):
            factor = before(t) if t < S else 0.1
            if S <= t < S + A:
                factor = 0.1 + (before(S) - 0.1) * (1 + cos(pi * (t - S) / A)) / 2
            expected.append([0.5 * factor, 0.125 * factor])
        taken = lrs_of(schedule, 25)
        torch.testing.assert_close(torch.tensor(taken).double(), torch.tensor(expected).double(), atol=1e-12, rtol=0)
        for step in range(25):
            first, second = make(), make()
            lrs_of(first, step)
            second["optimizer"].load_state_dict(deepcopy(first["optimizer"].state_dict()))
            scheduler_of(second).load_state_dict(deepcopy(scheduler_of(first).state_dict()))
            assert lrs_of(second, 25 - step) == taken[step:]


def test_the_tails_level_is_the_first_groups_learning_rate_also_of_timm_and_with_a_peak():
    mine = optimizer(0.5, torch.tensor(0.5), kind=torch.optim.Adam, foreach=False)
    mine.param_groups[0].update(max_lr=0.25, lr_scale=0.5)
    schedule = swa_tail(linear(mine, total_steps=8), start=0.5, swa_lr=0.05)
    assert lrs_of(schedule, 6)[-1] == pytest.approx([0.05, 0.2])


def test_the_tail_keeps_the_momentum_of_one_cycle():
    mine, plain = (optimizer(momentum=0.9) for _ in range(2))
    tailed = swa_tail(one_cycle(mine, total_steps=10, momentum=(0.8, 0.95)), swa_lr=0.1)
    untailed = one_cycle(plain, total_steps=10, momentum=(0.8, 0.95))
    for _ in range(12):
        assert momentum_of(mine.param_groups[0]) == momentum_of(plain.param_groups[0])
        lrs_of(tailed, 1)
        lrs_of(untailed, 1)


def test_a_tail_behind_an_endless_curve_takes_steps_or_a_told_total():
    for factory in (constant, inverse_sqrt):
        schedule = swa_tail(factory(optimizer(), warmup=2), start=20, swa_lr=0.25, anneal=40)
        assert lrs_of(schedule, 62)[-2:] == [[0.25], [0.25]]
        for lengths in ({}, {"start": 0.5}, {"start": 20, "anneal": 0.1}):
            message = rf"is a fraction of a total that {factory.__name__} did not need.*; pass total_steps="
            with pytest.raises(UnknownTotalSteps, match=message):
                swa_tail(factory(optimizer(), Tiny(), warmup=2), swa_lr=0.25, **lengths)
        assert lrs_of(swa_tail(factory(optimizer(), total_steps=8), swa_lr=0.25), 8)[6:] == [[0.25], [0.25]]


def test_a_wrong_tail_is_refused_by_name():
    cases = [
        (ValueError, {"start": 3}, r"start must not lie in the warmup, which ends at step 4, got 3 \(step 3\): start"),
        (ValueError, {"start": 0.3}, r"start must not lie in the warmup, .* got 0.3 \(step 3\)"),
        (ValueError, {"start": 11}, r"start and anneal must end by total_steps=10, got 11 and 0 \(step 11\): start"),
        (ValueError, {"start": 0.9, "anneal": 2}, r"must end by total_steps=10, got 0.9 and 2 \(step 11\)"),
        (TypeError, {"start": "3"}, r"start must be an int .*, got '3'"),
        (ValueError, {"start": 1.5}, r"start must be .*, got 1.5"),
        (TypeError, {"anneal": None}, r"anneal must be an int .*, got None"),
        (ValueError, {"swa_lr": -1}, r"swa_lr must be in \[0.0, inf\), got -1"),
        (TypeError, {"swa_lr": None}, r"swa_lr must be a number in \[0.0, inf\), got None"),
    ]
    before = partial(flat_cos, total_steps=10, warmup=4)
    assert_refused(lambda **tail: swa_tail(before(optimizer()), **{"swa_lr": 0.1, **tail}), cases)
    with pytest.raises(ValueError, match=r"swa_lr is relative to the first .* must not be 0"):
        swa_tail(cosine(optimizer(0.0, 0.1), total_steps=10), swa_lr=0.1)


def test_a_tail_goes_behind_a_curve_only():
    for make in (
        reduce_on_plateau,
        lambda optimizer: swa_tail(cosine(optimizer, total_steps=10), swa_lr=0.1),
        lambda optimizer: optimizer,
        lambda optimizer: cosine(optimizer, total_steps=10)["lr_scheduler"],
        lambda optimizer: {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)},
    ):
        with pytest.raises(TypeError, match="swa_tail goes after what another curve's factory returned, got"):
            swa_tail(make(optimizer()), swa_lr=0.1)


def test_the_state_of_a_tail_is_plain_data(tmp_path):
    make = partial(cosine, total_steps=10, warmup=2, floor=0.5)
    state = scheduler_of(swa_tail(make(optimizer(0.5)), start=6, swa_lr=np.float64(0.125))).state_dict()
    assert state["settings"] == {
        "curve": "swa_tail",
        "of": {"curve": "cosine", "total_steps": 10, "warmup": 2.0, "floor": 0.5},
        "start": 6.0,
        "level": 0.25,
        "anneal": 0.0,
    }
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
