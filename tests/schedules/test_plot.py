"""A drawn schedule is what a training takes, and drawing it changes nothing."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.schedules import CurveLR, cosine, flat_cos, linear, one_cycle, swa_tail
from lightning_tricks.schedules.factories import CURVES
from lightning_tricks.schedules.plot import plot_schedule


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


def adam(lr: Any = 0.1) -> Optimizer:
    """Two groups, and some steps behind it."""
    groups = [{"params": [nn.Parameter(torch.ones(3))], "name": "body"}, {"params": [nn.Parameter(torch.ones(2))]}]
    groups[1]["lr"] = 0.5 * lr
    optimizer = torch.optim.AdamW(groups, lr=lr, foreach=False)
    take_step(optimizer)
    return optimizer


def take_step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def lines(ax: Any) -> list[list[float]]:
    return [list(map(float, line.get_ydata())) for line in ax.lines]


def taken(scheduler: LRScheduler, steps: int, name: str = "lr") -> list[list[float]]:
    """What a training gets, by group."""
    rows = []
    for _ in range(steps):
        rows.append([float(g["betas"][0] if name == "betas" else g[name]) for g in scheduler.optimizer.param_groups])
        take_step(scheduler.optimizer)
        scheduler.step()
    return [list(column) for column in zip(*rows, strict=True)]


def halves(step: int) -> float:
    return 0.5**step


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "CurveLR": lambda o: cosine(o, total_steps=20, warmup=3)["lr_scheduler"]["scheduler"],
    "swa_tail": lambda o: swa_tail(cosine(o, total_steps=20), start=4, swa_lr=0.05)["lr_scheduler"]["scheduler"],
    "one_cycle": lambda o: one_cycle(o, total_steps=20, momentum=(0.85, 0.95))["lr_scheduler"]["scheduler"],
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [halves, lambda step: 1 / (step + 1)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
LENGTH = 9


@pytest.mark.few(6)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_is_drawn_as_it_goes_on(name):
    for before in (0, 4):
        scheduler = SCHEDULERS[name](adam())
        taken(scheduler, before)
        _, ax = plot_schedule(scheduler, LENGTH)
        if name != "ChainedScheduler":  # which does not know its step
            assert list(ax.lines[0].get_xdata()) == list(range(before, before + LENGTH))
        assert lines(ax) == taken(scheduler, LENGTH)


@pytest.mark.parametrize("name", CURVES)
def test_a_name_is_drawn_as_its_factory(name):
    _, named = plot_schedule(name, 20)
    _, made = plot_schedule(CURVES[name], 20)
    assert lines(named) == lines(made)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"schedule must be one of 'constant', .*'cosin'\. Did you mean 'cosine'"):
        plot_schedule("cosin", 20)


def state(scheduler: LRScheduler) -> bytes:
    """Everything about a scheduler and its optimizer, weights included, but functions."""
    optimizer = scheduler.optimizer
    own = {name: value for name, value in scheduler.state_dict().items() if name != "_schedulers"}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    everything = own, optimizer.state_dict(), [(p.detach(), p.grad, p._version) for p in parameters]
    return pickle.dumps(everything)


def test_drawing_changes_nothing():
    for name, make in SCHEDULERS.items():
        scheduler = make(adam())
        taken(scheduler, 2)
        before, attributes = state(scheduler), {**vars(scheduler)}
        step, groups = scheduler.optimizer.step, [dict(group) for group in scheduler.optimizer.param_groups]
        random = torch.get_rng_state()
        plot_schedule(scheduler, 5)
        assert state(scheduler) == before, name
        assert all(vars(scheduler)[key] is value for key, value in attributes.items()), name
        assert scheduler.optimizer.step is step, name
        for group, old in zip(scheduler.optimizer.param_groups, groups, strict=True):
            assert group.keys() == old.keys(), name
            assert all(group[key] is old[key] for key in old), name
        assert torch.equal(torch.get_rng_state(), random), name


def test_a_learning_rate_that_is_a_tensor_stays_as_it_is():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    scheduler = linear(optimizer, total_steps=4)["lr_scheduler"]["scheduler"]
    _, ax = plot_schedule(scheduler)
    assert lines(ax) == [[0.5, 0.375, 0.25, 0.125]]
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["initial_lr"]) == (0.5, 0.5)


def test_no_copy_is_made_of_weights_and_optimizer_state(monkeypatch):
    scheduler = SCHEDULERS["CurveLR"](adam())

    def refuse(self: torch.Tensor, memo: Any) -> None:
        raise AssertionError(f"copied a tensor of {self.numel()} numbers")

    monkeypatch.setattr(torch.Tensor, "__deepcopy__", refuse)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", refuse)
    plot_schedule(scheduler)


# -- what may be drawn -------------------------------------------------------------------------------------------------


def test_a_factory_is_drawn_for_a_base_learning_rate_of_1():
    for factory in (
        linear,  # takes the steps as its total
        partial(linear, total_steps=4),
        lambda optimizer: linear(optimizer, total_steps=4),
        lambda optimizer: linear(optimizer, total_steps=4)["lr_scheduler"],
        lambda optimizer: linear(optimizer, total_steps=4)["lr_scheduler"]["scheduler"],
        lambda optimizer: {"optimizer": optimizer, "lr_scheduler": lr_scheduler.LinearLR(optimizer, 1, 0, 4)},
    ):
        _, ax = plot_schedule(factory, 4)
        assert lines(ax) == [[1.0, 0.75, 0.5, 0.25]]
        assert ax.get_ylabel() == "learning rate / base"


def test_the_dictionary_of_a_factory_is_drawn_as_its_scheduler():
    schedule = flat_cos(adam(), total_steps=12, warmup=2)
    _, ax = plot_schedule(schedule)
    _, same = plot_schedule(schedule["lr_scheduler"]["scheduler"])
    assert lines(ax) == lines(same) == taken(schedule["lr_scheduler"]["scheduler"], 12)
    assert ax.get_ylabel() == "learning rate"


def test_the_steps_that_are_left_are_drawn_where_the_total_is_known():
    for name in ("CurveLR", "swa_tail", "one_cycle", "OneCycleLR"):
        scheduler = SCHEDULERS[name](adam())
        taken(scheduler, 5)
        _, ax = plot_schedule(scheduler)
        assert len(ax.lines[0].get_xdata()) == 15, name


def test_a_momentum_that_is_cycled_is_drawn_on_the_right():
    for name in ("one_cycle", "OneCycleLR"):
        scheduler = SCHEDULERS[name](adam())
        figure, ax = plot_schedule(scheduler, LENGTH)
        left, right = figure.axes
        assert left is ax
        assert (left.get_ylabel(), right.get_ylabel()) == ("learning rate", "momentum")
        assert lines(right) == taken(scheduler, LENGTH, "betas")


def test_the_momentum_of_a_factory_is_drawn_too():
    figure, _ = plot_schedule(partial(one_cycle, momentum=(0.85, 0.95)), 10)
    assert max(lines(figure.axes[1])[0]) == pytest.approx(0.95)


def test_a_momentum_that_stays_is_not_drawn():
    figure, _ = plot_schedule(SCHEDULERS["StepLR"](adam()), LENGTH)
    assert len(figure.axes) == 1


def test_a_curve_that_is_not_of_the_package_needs_the_steps():
    scheduler = CurveLR(adam(), partial(lambda step, rate: rate**step, rate=0.5))
    with pytest.raises(ValueError, match=r"CurveLR does not tell how long it is: pass steps=\.\.\."):
        plot_schedule(scheduler)
    _, ax = plot_schedule(scheduler, 3)
    assert lines(ax)[0] == [0.1, 0.05, 0.025]


def test_axes_are_linear_and_may_be_given():
    figure, both = plt.subplots(1, 2)
    assert plot_schedule(linear, 4, ax=both[1]) == (figure, both[1])
    assert both[1].get_yscale() == "linear"
    assert both[1].get_xlabel() == "step"
    assert not both[0].lines


def test_groups_are_named_and_one_alone_needs_no_legend():
    _, ax = plot_schedule(SCHEDULERS["StepLR"](adam()), LENGTH)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["body", "group 1"]
    _, alone = plot_schedule(linear, 4)
    assert alone.get_legend() is None


def test_what_cannot_be_drawn_says_why():
    with pytest.raises(ValueError, match=r"length of the schedule is unknown .*: pass steps=\.\.\."):
        plot_schedule(linear)
    with pytest.raises(ValueError, match=r"StepLR does not tell how long it is: pass steps="):
        plot_schedule(SCHEDULERS["StepLR"](adam()))
    with pytest.raises(TypeError, match="depend on a metric"):
        plot_schedule(lr_scheduler.ReduceLROnPlateau(adam()), 4)
    for wrong in (adam(), {"optimizer": adam()}, None, lambda optimizer: optimizer):
        with pytest.raises(TypeError, match="schedule must be a factory"):
            plot_schedule(wrong, 4)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        plot_schedule(linear, 0)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\[plot\]"):
        plot_schedule(linear, 4)
