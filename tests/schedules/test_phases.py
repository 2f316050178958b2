"""The shapes of several phases in use: momentum beside one cycle, wsd's three falls, the tail for averaging."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from math import cos, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from lightning_tricks.schedules import (
    UnknownTotalSteps,
    constant,
    cosine,
    flat_cos,
    inverse_sqrt,
    linear,
    one_cycle,
    reduce_on_plateau,
    swa_tail,
    wsd,
)
from tests.nets import trainer
from tests.schedules.recording import SaveEveryStep, Tiny, ones
from tests.schedules.test_factories import FACTORIES, lrs_of, optimizer


def momenta(group: dict[str, Any]) -> float:
    return group["betas"][0] if "betas" in group else group["momentum"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("pair", [(0.85, 0.95), [0.0, 0.5], (0.9, 0.9)])
def test_one_cycle_moves_the_momentum_as_torch_does(kind, pair):
    settings = {"betas": (0.9, 0.99)} if kind.__name__.startswith("Adam") else {"momentum": 0.9}
    ours, theirs = (optimizer(0.5, 0.25, kind=kind, **settings) for _ in range(2))
    mine = one_cycle(ours, total_steps=20, momentum=pair)["lr_scheduler"]["scheduler"]
    low, high = pair
    torchs = OneCycleLR(theirs, [0.5, 0.25], 20, base_momentum=low, max_momentum=high)
    for step in range(20):
        for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert a["lr"] == pytest.approx(b["lr"], rel=0, abs=1e-12)
            assert momenta(a) == pytest.approx(momenta(b), rel=0, abs=1e-12)
            assert "betas" not in a or a["betas"][1:] == (0.99,)
        for each in (ours, theirs):
            each.step()
        mine.step()
        if step < 19:
            torchs.step()
    assert {momenta(group) for group in ours.param_groups} == {high}


def test_one_cycle_leaves_momentum_alone_unless_asked():
    mine = optimizer(momentum=0.7)
    lrs_of(one_cycle(mine, total_steps=5), 5)
    assert mine.param_groups[0]["momentum"] == 0.7


def test_a_group_that_joins_takes_the_momentum_of_the_cycle():
    mine = optimizer(momentum=0.9)
    scheduler = one_cycle(mine, total_steps=10, momentum=(0.8, 0.95))["lr_scheduler"]["scheduler"]
    mine.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "momentum": 0.1})
    mine.step()
    scheduler.step()
    assert momenta(mine.param_groups[0]) == momenta(mine.param_groups[1]) == scheduler.momentum(1)


@pytest.mark.parametrize(
    ("shape", "fall"),
    [("1-sqrt", lambda p: 1 - sqrt(p)), ("linear", lambda p: 1 - p), ("cosine", lambda p: (1 + cos(pi * p)) / 2)],
)
@pytest.mark.parametrize(("cooldown", "C"), [(0.2, 4), (6, 6), (0.5, 10), (1, 1), (0, 0)])
def test_wsd_warms_up_stays_and_falls_in_its_shape(shape, fall, cooldown, C):
    schedule = wsd(optimizer(0.5), total_steps=20, warmup=0.2, cooldown=cooldown, shape=shape, floor=0.1)
    expected = [0.25, 0.5, 0.75, *[1.0] * (17 - C), *(0.1 + 0.9 * fall(p / C) for p in range(C + 1) if C)]
    expected += [1.0] * (20 - len(expected)) + [0.1] * (25 - max(20, len(expected)))
    assert [lr for (lr,) in lrs_of(schedule, 25)] == pytest.approx([0.5 * f for f in expected], rel=0, abs=1e-12)


@pytest.mark.parametrize("anneal", [0, 3, 0.1])
@pytest.mark.parametrize("start", [12, 0.6])
@pytest.mark.parametrize("factory", FACTORIES)
def test_the_tail_goes_behind_every_curve_with_its_groups(factory, start, anneal):
    def make() -> Any:
        return swa_tail(factory(optimizer(0.5, 0.125), total_steps=20), start=start, swa_lr=0.05, anneal=anneal)

    schedule, S, A = make(), 12, 2 if anneal == 0.1 else anneal
    before = factory(optimizer(), total_steps=20)["lr_scheduler"]["scheduler"].curve
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
        second["lr_scheduler"]["scheduler"].load_state_dict(deepcopy(first["lr_scheduler"]["scheduler"].state_dict()))
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
        assert momenta(mine.param_groups[0]) == momenta(plain.param_groups[0])
        lrs_of(tailed, 1)
        lrs_of(untailed, 1)


@pytest.mark.parametrize("factory", [cosine, constant, one_cycle])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
def test_a_fit_with_a_tail_resumes_from_any_step(tmp_path, factory):
    def lrs(**kwargs: Any) -> list[float]:
        given = {"total_steps": 9} if factory is constant else {}
        module = Tiny(lambda opt, module: swa_tail(factory(opt, module, **given), swa_lr=0.02, anneal=2), lr=0.1)
        run = trainer(max_epochs=3, accumulate_grad_batches=2, callbacks=[SaveEveryStep(tmp_path)])
        run.fit(module, ones(5), **kwargs)
        assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.02, rel=0, abs=1e-15)
        return module.optimizer.lrs

    whole = lrs()
    for step in range(1, 9):
        assert lrs(ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True) == whole[step:]


def test_a_tail_behind_an_endless_curve_takes_steps_or_a_told_total():
    for factory in (constant, inverse_sqrt):
        schedule = swa_tail(factory(optimizer(), warmup=2), start=20, swa_lr=0.25, anneal=40)
        assert lrs_of(schedule, 62)[-2:] == [[0.25], [0.25]]
        for lengths in ({}, {"start": 0.5}, {"start": 20, "anneal": 0.1}):
            message = rf"is a fraction of a total that {factory.__name__} did not need.*; pass total_steps="
            with pytest.raises(UnknownTotalSteps, match=message):
                swa_tail(factory(optimizer(), Tiny(), warmup=2), swa_lr=0.25, **lengths)
        assert lrs_of(swa_tail(factory(optimizer(), total_steps=8), swa_lr=0.25), 8)[6:] == [[0.25], [0.25]]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"start": 3}, ValueError, r"start must not lie in the warmup, which ends at step 4, got 3 \(step 3\): start"),
        ({"start": 0.3}, ValueError, r"start must not lie in the warmup, .* got 0.3 \(step 3\)"),
        ({"start": 11}, ValueError, r"start and anneal must end by total_steps=10, got 11 and 0 \(step 11\): start"),
        ({"start": 0.9, "anneal": 2}, ValueError, r"must end by total_steps=10, got 0.9 and 2 \(step 11\)"),
        ({"start": "3"}, TypeError, r"start must be an int .*, got '3'"),
        ({"start": 1.5}, ValueError, r"start must be .*, got 1.5"),
        ({"anneal": None}, TypeError, r"anneal must be an int .*, got None"),
        ({"swa_lr": -1}, ValueError, r"swa_lr must be in \[0.0, inf\), got -1"),
        ({"swa_lr": None}, TypeError, r"swa_lr must be a number in \[0.0, inf\), got None"),
    ],
)
def test_a_wrong_tail_is_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        swa_tail(flat_cos(optimizer(), total_steps=10, warmup=4), **{"swa_lr": 0.1, **settings})


@pytest.mark.parametrize(
    "make",
    [
        reduce_on_plateau,
        lambda optimizer: swa_tail(cosine(optimizer, total_steps=10), swa_lr=0.1),
        lambda optimizer: optimizer,
        lambda optimizer: cosine(optimizer, total_steps=10)["lr_scheduler"],
        lambda optimizer: {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)},
    ],
)
def test_a_tail_goes_behind_a_curve_only(make):
    with pytest.raises(TypeError, match="swa_tail goes behind what another curve's factory returned, got"):
        swa_tail(make(optimizer()), swa_lr=0.1)


def test_a_tail_cannot_be_relative_to_a_learning_rate_of_zero():
    with pytest.raises(ValueError, match=r"swa_lr is relative to the first .* must not be 0"):
        swa_tail(cosine(optimizer(0.0, 0.1), total_steps=10), swa_lr=0.1)


def test_the_state_of_a_tail_is_plain_data(tmp_path):
    make = partial(cosine, total_steps=10, warmup=2, floor=0.5)
    state = swa_tail(make(optimizer(0.5)), start=6, swa_lr=np.float64(0.125))["lr_scheduler"]["scheduler"].state_dict()
    assert state["settings"] == {
        "curve": "swa_tail",
        "of": {"curve": "cosine", "total_steps": 10, "warmup": 2.0, "floor": 0.5},
        "start": 6.0,
        "level": 0.25,
        "anneal": 0.0,
    }
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
