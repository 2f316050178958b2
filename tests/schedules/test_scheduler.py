"""The state of a schedule is plain data, and a resumed run takes the same learning rates bit for bit."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_tricks.schedules import CurveLR, curves, flat_cos, one_cycle
from tests.nets import trainer
from tests.schedules.recording import SaveEveryStep, Tiny, ones

FLAT_COS = partial(curves.flat_cos, total_steps=12, warmup=2.5, floor=0.01)
ONE_CYCLE = partial(curves.one_cycle, total_steps=12)


def start(curve: partial[float] = FLAT_COS, lr: Any = 0.1) -> CurveLR:
    kind = torch.optim.Adam if isinstance(lr, torch.Tensor) else torch.optim.SGD
    return CurveLR(kind([torch.nn.Parameter(torch.ones(1))], lr=lr, foreach=False), curve)


def advance(scheduler: CurveLR, steps: int) -> list[float]:
    taken = []
    for _ in range(steps):
        taken.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        scheduler.optimizer.step()
        scheduler.step()
    return taken


def test_the_state_is_plain_data():
    scheduler = start()
    advance(scheduler, 3)
    settings = {"curve": "flat_cos", "total_steps": 12, "warmup": 2.5, "floor": 0.01}
    assert scheduler.state_dict() == {"last_epoch": 3, "settings": settings}


def test_the_state_is_a_copy():
    scheduler = start()
    scheduler.state_dict()["settings"]["warmup"] = 7
    assert scheduler.state_dict()["settings"]["warmup"] == 2.5


def test_the_state_loads_as_weights_only_even_if_given_numpy_numbers(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = flat_cos(optimizer, total_steps=12, warmup=np.float64(0.1), floor=np.float64(0.01))
    state = schedule["lr_scheduler"]["scheduler"].state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state


def test_a_scheduler_pickles_with_its_optimizer():
    scheduler = start()
    advance(scheduler, 3)
    twin = pickle.loads(pickle.dumps(scheduler))
    assert twin.optimizer is not scheduler.optimizer
    assert advance(twin, 12) == advance(scheduler, 12)


@pytest.mark.parametrize("curve", [FLAT_COS, ONE_CYCLE])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("optimizer_too", [False, True])
def test_resuming_at_any_step_gives_the_same_learning_rates(curve, lr, optimizer_too):
    whole = advance(start(curve, lr.clone() if isinstance(lr, torch.Tensor) else lr), 15)
    for step in range(15):
        first, second = (start(curve, lr.clone() if isinstance(lr, torch.Tensor) else lr) for _ in range(2))
        advance(first, step)
        if optimizer_too:
            second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.load_state_dict(first.state_dict())
        assert second.get_last_lr() == first.get_last_lr()
        assert second._step_count == first._step_count
        assert advance(second, 15 - step) == whole[step:]


def test_last_lr_does_not_alias_the_optimizers_tensor():
    scheduler = start(lr=torch.tensor(0.1))
    scheduler.load_state_dict(scheduler.state_dict())
    (last,) = scheduler.get_last_lr()
    assert last is not scheduler.optimizer.param_groups[0]["lr"]


def test_loading_other_settings_warns_once_and_follows_the_new_curve():
    first, second = start(), start(longer := partial(FLAT_COS.func, total_steps=24, warmup=2.5, floor=0.01))
    advance(first, 8)
    with pytest.warns(UserWarning, match=r"'total_steps': 12.*is not this run's.*'total_steps': 24") as caught:
        second.load_state_dict(first.state_dict())
    assert len(caught) == 1
    assert advance(second, 20) == [0.1 * longer(t) for t in range(8, 28)]


def fit(schedule: Any, folder: Any, epochs: int = 3, resume: int | None = None) -> list[float]:
    """The learning rates of a fit that saves every step, or of one resumed from such a step."""
    module = Tiny(schedule, lr=0.1)
    run = trainer(max_epochs=epochs, accumulate_grad_batches=2, callbacks=[SaveEveryStep(folder)])
    if resume is None:
        run.fit(module, ones(5))
    else:
        run.fit(module, ones(5), ckpt_path=folder / f"{resume}.ckpt", weights_only=True)
    return module.optimizer.lrs


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
@pytest.mark.parametrize("schedule", [flat_cos, one_cycle])
def test_a_fit_resumed_from_any_step_takes_the_same_learning_rates(tmp_path, schedule):
    whole = fit(schedule, tmp_path)
    assert len(whole) == 9
    for step in range(1, 9):
        assert fit(schedule, tmp_path, resume=step) == whole[step:]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
def test_a_fit_resumed_for_longer_warns_once_and_ends_at_the_floor(tmp_path):
    fit(flat_cos, tmp_path)
    with pytest.warns(UserWarning, match="is not this run's") as caught:
        resumed = fit(flat_cos, tmp_path, epochs=4, resume=6)
    assert sum("is not this run's" in str(warning.message) for warning in caught) == 1
    assert resumed == [0.1 * curves.flat_cos(t, total_steps=12) for t in range(6, 12)]


def test_a_scheduler_continues_from_a_given_step():
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "initial_lr": 0.1}], lr=0.1)
    assert advance(CurveLR(optimizer, FLAT_COS, last_epoch=4), 3) == [0.1 * FLAT_COS(t) for t in (5, 6, 7)]


def test_the_state_of_another_scheduler_is_refused_by_name() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()
    with pytest.raises(ValueError, match="another kind of scheduler than CurveLR, with 'step_size'"):
        CurveLR(optimizer, partial(curves.linear, total_steps=4)).load_state_dict(theirs)


def test_a_curve_that_is_not_bound_by_partial_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match=r"curve must be .* functools\.partial"):
        CurveLR(optimizer, lambda step: 1.0)
