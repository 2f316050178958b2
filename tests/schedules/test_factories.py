"""What the factories return, what they refuse, and the learning rates of a real fit."""

from __future__ import annotations

from inspect import isfunction, signature
from math import cos, pi
from typing import Any

import pytest
import torch

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
    polynomial,
    step_decay,
    swa_tail,
    wsd,
)
from tests.nets import Net, assert_equal, build, fit, loader, trainer, weights
from tests.schedules.recording import Tiny, ones

FALLING = [cosine, cosine_restarts, flat_cos, linear, one_cycle, polynomial, step_decay, wsd]
FACTORIES = [constant, inverse_sqrt, *FALLING]


def optimizer(*lrs: Any, kind: Any = torch.optim.SGD, **settings: Any) -> torch.optim.Optimizer:
    return kind([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs or (1.0,)], **settings)


def lrs_of(schedule: dict[str, Any], steps: int) -> list[list[float]]:
    """The learning rate of each group in each of the first steps."""
    taken = []
    for _ in range(steps):
        taken.append([float(group["lr"]) for group in schedule["optimizer"].param_groups])
        schedule["optimizer"].step()
        schedule["lr_scheduler"]["scheduler"].step()
    return taken


def test_every_curve_has_its_factory():
    curves = {name for name, value in vars(schedules.curves).items() if isfunction(value) and name[0] != "_"}
    factories = {factory.__name__ for factory in [*FACTORIES, swa_tail]}
    assert factories == curves - {"one_cycle_momentum"}
    assert factories < set(schedules.__all__)


@pytest.mark.parametrize("factory", FACTORIES)
def test_the_defaults_of_a_factory_are_those_of_its_curve(factory):
    curve = getattr(schedules.curves, factory.__name__)
    scheduler = factory(optimizer(), total_steps=40)["lr_scheduler"]["scheduler"]
    assert [scheduler.curve(t) for t in range(60)] == [curve(t, total_steps=40) for t in range(60)]


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_factory_returns_all_that_lightning_wants(factory):
    mine = optimizer()
    schedule = factory(mine, total_steps=10)
    scheduler = schedule["lr_scheduler"].pop("scheduler")
    assert schedule == {"optimizer": mine, "lr_scheduler": {"interval": "step", "frequency": 1}}
    assert schedule["optimizer"] is scheduler.optimizer is mine
    assert isinstance(scheduler, CurveLR)


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_each_group_follows_the_curve_from_its_own_base(factory, as_tensor):
    mine = optimizer(*map(torch.tensor if as_tensor else float, (0.5, 0.125)), kind=torch.optim.AdamW, foreach=False)
    schedule = factory(mine, total_steps=10, warmup=3)
    factors = [schedule["lr_scheduler"]["scheduler"].curve(t) for t in range(14)]
    expected = torch.tensor([[0.5 * factor, 0.125 * factor] for factor in factors], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(lrs_of(schedule, 14)).double(), expected, atol=1e-7, rtol=0)
    assert all(isinstance(group["lr"], torch.Tensor) == as_tensor for group in mine.param_groups)


def test_a_fraction_is_the_same_as_its_steps():
    by_fraction = lrs_of(flat_cos(optimizer(), total_steps=40, warmup=0.1, flat=0.5), 50)
    assert by_fraction == lrs_of(flat_cos(optimizer(), total_steps=40, warmup=4, flat=20), 50)


def test_a_whole_float_is_a_fraction_and_a_whole_int_is_steps():
    assert lrs_of(linear(optimizer(), total_steps=4, warmup=1.0), 4) == [[0.25], [0.5], [0.75], [1.0]]
    assert lrs_of(linear(optimizer(), total_steps=4, warmup=1), 3) == [[1.0], [1.0], [1 - 1 / 3]]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_group_added_later_follows_the_curve_from_its_own_base(as_tensor):
    wrap = torch.tensor if as_tensor else float
    mine = optimizer(wrap(1.0), kind=torch.optim.AdamW, foreach=False)
    schedule = linear(mine, total_steps=8)
    lrs_of(schedule, 2)
    mine.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": wrap(0.5)})
    assert lrs_of(schedule, 4) == [[0.75, 0.5], [0.625, 0.3125], [0.5, 0.25], [0.375, 0.1875]]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_groups_max_lr_and_lr_scale_are_its_own_base(factory, as_tensor):
    wrap = torch.tensor if as_tensor else float
    mine = optimizer(*map(wrap, (0.5, 0.5, 0.5, 0.5)), kind=torch.optim.AdamW, foreach=False)
    mine.param_groups[1]["max_lr"] = wrap(0.25)
    mine.param_groups[2]["lr_scale"] = 0.125
    mine.param_groups[3].update(max_lr=wrap(2.0), lr_scale=0.5)
    schedule = factory(mine, total_steps=10, warmup=3)
    lrs_of(schedule, 4)
    added = {"lr": wrap(7.0), "max_lr": wrap(4.0), "lr_scale": 0.5}
    mine.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **added})
    schedule["lr_scheduler"]["scheduler"].step()
    factors = [schedule["lr_scheduler"]["scheduler"].curve(t) for t in range(5, 14)]
    expected = torch.tensor([[base * f for base in (0.5, 0.25, 0.0625, 1.0, 2.0)] for f in factors]).double()
    torch.testing.assert_close(torch.tensor(lrs_of(schedule, 9)).double(), expected, atol=1e-6, rtol=0)
    assert all(isinstance(group["lr"], torch.Tensor) == as_tensor for group in mine.param_groups)


def test_the_highest_learning_rate_of_one_cycle_is_the_optimizers():
    assert max(lrs_of(one_cycle(optimizer(0.3), total_steps=10), 10)) == [0.3]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(
    ("error", "settings", "message"),
    [
        (ValueError, {"warmup": -1}, r"warmup must be an int >= 0 \(steps\) or a float in \[0, 1\] .*got -1"),
        (ValueError, {"warmup": 1.5}, r"warmup must be .* a float in \[0, 1\] .*got 1.5"),
        (ValueError, {"warmup": float("nan")}, r"warmup must be .* got nan"),
        (TypeError, {"warmup": True}, r"warmup must be an int .*or a float .*got True"),
        (TypeError, {"warmup": "5"}, r"warmup must be an int .*or a float .*got '5'"),
        (ValueError, {"warmup": 11}, r"warmup must be at most total_steps=10, got 11"),
        (ValueError, {"floor": 2}, r"floor must be in \[0.0, 1.0\], got 2"),
        (ValueError, {"floor": -0.1}, r"floor must be in \[0.0, 1.0\], got -0.1"),
        (TypeError, {"floor": None}, r"floor must be a number in \[0.0, 1.0\], got None"),
        (ValueError, {"total_steps": 0}, r"total_steps must be at least 1, got 0"),
        (TypeError, {"total_steps": 10.0}, r"total_steps must be a whole number, got 10.0"),
        (TypeError, {"total_steps": True}, r"total_steps must be a whole number, got True"),
    ],
)
def test_an_error_names_the_argument_the_value_and_what_is_allowed(factory, error, settings, message):
    with pytest.raises(error, match=message):
        factory(optimizer(), **{"total_steps": 10, **settings})


@pytest.mark.parametrize("factory", FALLING)
def test_without_module_and_total_a_factory_says_what_to_pass(factory):
    with pytest.raises(UnknownTotalSteps, match=r"neither module nor total_steps.*; pass total_steps="):
        factory(optimizer())


def test_a_module_without_a_trainer_says_where_to_ask():
    with pytest.raises(UnknownTotalSteps, match=r"no Trainer yet .*configure_optimizers.*; pass total_steps="):
        flat_cos(optimizer(), Tiny())


def test_a_refused_schedule_leaves_the_optimizer_alone():
    mine = optimizer(0.5)
    with pytest.raises(ValueError, match="warmup"):
        flat_cos(mine, total_steps=10, warmup=11)
    assert mine.param_groups[0]["lr"] == 0.5
    assert "initial_lr" not in mine.param_groups[0]


def test_an_endless_curve_needs_no_total_unless_its_warmup_is_a_fraction():
    assert lrs_of(constant(optimizer(), warmup=2), 4) == [[0.5], [1.0], [1.0], [1.0]]
    assert lrs_of(inverse_sqrt(optimizer(), Tiny(), warmup=4), 16)[3::12] == [[1.0], [0.5]]
    for factory in (constant, inverse_sqrt):
        assert factory(optimizer())["lr_scheduler"]["scheduler"].settings["total_steps"] is None
        with pytest.raises(UnknownTotalSteps):
            factory(optimizer(), warmup=0.5)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_flat_cos_is_exact_in_every_step_of_a_fit(accumulation):
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


SETTINGS = {"milestones": [2, 0.5], "warmup": 1, "cooldown": 0.5, "cycles": 2, "power": 2, "floor": 0.01}


@pytest.mark.parametrize(
    ("fitted", "steps"),
    [
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 9),  # the third window of an epoch is ragged
        ({"max_epochs": 3, "accumulate_grad_batches": 2, "max_steps": 7}, 7),
        ({"max_epochs": -1, "max_steps": 11}, 11),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
    ],
)
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_fit_takes_the_curve_to_its_last_value(factory, fitted, steps):
    taken = {name: SETTINGS[name] for name in signature(factory).parameters.keys() & SETTINGS}
    module = Tiny(lambda optimizer, module: factory(optimizer, module, **taken))
    run = trainer(**fitted)
    run.fit(module, ones(5))
    scheduler = run.lr_scheduler_configs[0].scheduler
    assert scheduler.settings["total_steps"] == (None if factory in (constant, inverse_sqrt) else steps)
    assert module.optimizer.lrs == [scheduler.curve(t) for t in range(steps)]
    assert module.optimizer.param_groups[0]["lr"] == scheduler.curve(steps)
    if factory in FALLING:
        assert scheduler.curve(steps) == (0.01 if factory is not step_decay else pytest.approx(0.01))


class Constant(Net):
    def configure_optimizers(self) -> Any:
        return constant(super().configure_optimizers(), self)


def test_a_constant_schedule_trains_bit_equal_to_none():
    plain, scheduled = build(Net), build(Constant)
    fit(plain)
    fit(scheduled)
    assert_equal(weights(plain), weights(scheduled))


def test_arguments_in_the_wrong_order_are_named() -> None:
    module, optimizer = build(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match="optimizer must be a torch Optimizer"):
        schedules.flat_cos(module, optimizer)
    with pytest.raises(TypeError, match="module must be a LightningModule, got Linear"):
        schedules.flat_cos(optimizer, torch.nn.Linear(1, 1))


def test_a_second_fit_of_one_trainer_has_a_whole_schedule_of_its_own() -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            return schedules.linear(super().configure_optimizers(), self)

    module = build(Scheduled)
    run = fit(module, max_epochs=2)
    assert run.optimizers[0].param_groups[0]["lr"] == 0
    run.fit_loop.max_epochs = 4
    run.fit(module, loader(), loader(24))
    assert run.lr_scheduler_configs[0].scheduler.settings["total_steps"] == 12
    assert run.optimizers[0].param_groups[0]["lr"] == 0
