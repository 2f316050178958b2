"""The state of a schedule is plain data, and a resumed run takes the same learning rates bit for bit."""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import timm.optim
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_tricks import schedules
from lightning_tricks.schedules import CurveLR, curves, flat_cos, one_cycle, swa_tail
from tests.few import few
from tests.nets import TORCH_2_9, trainer
from tests.refusals import assert_refused
from tests.schedules.recording import FACTORIES, SaveEveryStep, Tiny, ones, optimizer, scheduler_of

FLAT_COS = partial(curves.flat_cos, total_steps=12, warmup=2.5, floor=0.01)
ONE_CYCLE = partial(curves.one_cycle, total_steps=12)
ENDLESS = (schedules.constant, schedules.inverse_sqrt)


def tailed(optimizer: Any, module: Any) -> Any:
    return swa_tail(flat_cos(optimizer, module), swa_lr=0.03, anneal=1)


def cycled(optimizer: Any, module: Any) -> Any:
    return one_cycle(optimizer, module, momentum=(0.85, 0.95))


def start(curve: Any = FLAT_COS, lr: Any = 0.1) -> CurveLR:
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
    schedule = flat_cos(optimizer(0.1), total_steps=12, warmup=np.float64(0.1), floor=np.float64(0.01))
    state = scheduler_of(schedule).state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state


def test_a_scheduler_pickles_with_its_optimizer():
    scheduler = start()
    advance(scheduler, 3)
    twin = pickle.loads(pickle.dumps(scheduler))
    assert twin.optimizer is not scheduler.optimizer
    assert advance(twin, 12) == advance(scheduler, 12)


def halved(step: float) -> float:
    return 0.5**step


@dataclass(frozen=True)
class Halved:
    every: int

    def __call__(self, step: float) -> float:
        return 0.5 ** (step // self.every)


@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_resuming_at_any_step_gives_the_same_learning_rates(wrap):
    for curve, optimizer_too in product([FLAT_COS, ONE_CYCLE, halved, Halved(3)], [False, True]):
        whole = advance(start(curve, wrap(0.1)), 15)
        for step in range(15):
            first, second = (start(curve, wrap(0.1)) for _ in range(2))
            advance(first, step)
            if optimizer_too:
                second.optimizer.load_state_dict(first.optimizer.state_dict())
            second.load_state_dict(first.state_dict())
            assert second.get_last_lr() == first.get_last_lr()
            assert second._step_count == first._step_count
            assert advance(second, 15 - step) == whole[step:]


def test_a_curve_of_ones_own_is_named_in_the_state_and_copied(tmp_path):
    states = {halved: {"curve": "halved"}, Halved(3): {"curve": "Halved", "every": 3}}
    states |= {partial(halved): {"curve": "halved"}}
    for curve, settings in states.items():
        scheduler = start(curve)
        assert scheduler.state_dict() == {"last_epoch": 0, "settings": settings}
        advance(scheduler, 2)
        twin = pickle.loads(pickle.dumps(scheduler))
        assert advance(twin, 4) == advance(scheduler, 4) == [0.1 * curve(t) for t in range(2, 6)]
        torch.save(scheduler.state_dict(), tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == scheduler.state_dict()


@pytest.mark.skipif(TORCH_2_9, reason="a limit of torch 2.9: its schedulers give away learning rates that are Tensors")
def test_last_lr_does_not_alias_the_optimizers_tensor():
    scheduler = start(lr=torch.tensor(0.1))
    scheduler.load_state_dict(scheduler.state_dict())
    (last,) = scheduler.get_last_lr()
    assert last is not scheduler.optimizer.param_groups[0]["lr"]


def test_a_checkpoint_that_has_lists_in_place_of_tuples_has_the_same_settings():
    """As of XLA."""
    scheduler = start(partial(curves.step_decay, total_steps=12, milestones=(3, 6)))
    advance(scheduler, 4)
    state = scheduler.state_dict()
    state["settings"]["milestones"] = [3, 6]
    twin = start(scheduler.curve)
    twin.load_state_dict(state)
    assert advance(twin, 4) == advance(scheduler, 4)


def test_loading_other_settings_warns_once_and_follows_the_new_curve():
    first, second = start(), start(longer := partial(FLAT_COS.func, total_steps=24, warmup=2.5, floor=0.01))
    advance(first, 8)
    with pytest.warns(UserWarning, match=r"'total_steps': 12.*is not this run's.*'total_steps': 24") as caught:
        second.load_state_dict(first.state_dict())
    assert len(caught) == 1
    assert advance(second, 20) == [0.1 * longer(t) for t in range(8, 28)]


class Recorded(torch.optim.AdamW):
    """Keeps the learning rate and the first beta of each group in every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken: list[list[tuple[float, float]]] = []

    def step(self, closure: Any = None) -> Any:
        self.taken.append([(float(group["lr"]), group["betas"][0]) for group in self.param_groups])
        return super().step(closure)


class TwoGroups(Tiny):
    def __init__(self, schedule: Any, wrap: Any = float) -> None:
        super().__init__(schedule)
        self.wrap = wrap  # of each learning rate

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [self.layer.weight], "lr": self.wrap(0.1)},
            {"params": [self.layer.bias], "lr": self.wrap(0.1), "max_lr": self.wrap(0.5), "lr_scale": 0.5},
        ]
        self.optimizer = Recorded(groups, foreach=False)
        return self.schedule(self.optimizer, self)


class SaveEverywhere(SaveEveryStep):
    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")  # in place of the last step's


def fit(schedule: Any, folder: Any, epochs: int = 3, resume: int | None = None, **settings: Any) -> list[Any]:
    """What the steps of a fit took that saves everywhere, or of one resumed from such a checkpoint."""
    module = TwoGroups(schedule, **settings)
    saves = [SaveEverywhere(folder)] if resume is None else []
    run = trainer(max_epochs=epochs, accumulate_grad_batches=2, callbacks=saves)
    if resume is None:
        run.fit(module, ones(5))
    else:
        run.fit(module, ones(5), ckpt_path=folder / f"{resume}.ckpt", weights_only=True)
    module.optimizer.taken.append([(float(group["lr"]), group["betas"][0]) for group in module.optimizer.param_groups])
    return module.optimizer.taken


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
@pytest.mark.parametrize("schedule", few([*FACTORIES, tailed, cycled], 3), ids=lambda schedule: schedule.__name__)
def test_a_fit_resumed_from_any_step_takes_the_same_learning_rates(tmp_path, schedule):
    for wrap in (float, torch.tensor):
        folder = tmp_path / wrap.__name__
        folder.mkdir()
        whole = fit(schedule, folder, wrap=wrap)
        assert len(whole) == 10
        for step in range(1, 10):
            assert fit(schedule, folder, resume=step, wrap=wrap) == whole[step:]


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
@pytest.mark.parametrize("schedule", [*FACTORIES, tailed, cycled], ids=lambda schedule: schedule.__name__)
def test_a_fit_resumed_for_longer_tells_so_once_and_follows_the_new_total(tmp_path, schedule, caplog):
    (tmp_path / "longer").mkdir()
    fit(schedule, tmp_path)
    longer = fit(schedule, tmp_path / "longer", epochs=4)
    if schedule in ENDLESS:
        assert fit(schedule, tmp_path, epochs=4, resume=6) == longer[6:]
        return
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        resumed = fit(schedule, tmp_path, epochs=4, resume=6)
    (told,) = [text for text in caplog.messages if text.startswith("The plan of training has changed")]
    assert "from 9 to 12 optimizer steps, of which 6 are left, with a learning rate of" in told
    assert resumed == longer[6:]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
def test_a_fit_resumed_with_other_settings_of_its_curve_warns_once(tmp_path):
    fit(partial(flat_cos, flat=0.5), tmp_path)
    with pytest.warns(UserWarning, match=r"'flat': 4.5.*is not this run's.*'flat': 6.0") as caught:
        fit(partial(flat_cos, flat=6), tmp_path, epochs=4, resume=6)
    assert sum("is not this run's" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scheduler: pickle.loads(pickle.dumps(scheduler))])
def test_a_copy_goes_on_with_an_optimizer_of_its_own(copied):
    for make in (
        *(partial(factory, total_steps=12) for factory in FACTORIES),
        lambda optimizer: swa_tail(flat_cos(optimizer, total_steps=12), swa_lr=0.03),
        lambda optimizer: one_cycle(optimizer, total_steps=12, momentum=(0.8, 0.9)),
    ):
        scheduler = scheduler_of(make(optimizer(0.1, 0.2, momentum=0.9)))
        advance(scheduler, 5)
        twin = copied(scheduler)
        assert twin.optimizer is not scheduler.optimizer
        assert advance(twin, 10) == advance(scheduler, 10)
        groups = zip(twin.optimizer.param_groups, scheduler.optimizer.param_groups, strict=True)
        assert all(copied_group["momentum"] == group["momentum"] for copied_group, group in groups)


class Layers(torch.nn.Sequential):
    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": r"^0", "blocks": r"^(\d+)"}


def test_timms_layer_decay_trains_each_layer_at_its_own_learning_rate():
    model = Layers(*(torch.nn.Linear(2, 2) for _ in range(4)))
    groups = timm.optim.param_groups_layer_decay(model, layer_decay=0.5)
    scales = [group["lr_scale"] for group in groups]
    assert len(set(scales)) > 2

    class Decayed(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0].repeat(1, 2)).square().mean()

        def configure_optimizers(self) -> Any:
            self.optimizer = Recorded(groups, lr=0.1)
            return schedules.cosine(self.optimizer, self, warmup=2)

    module = Decayed()
    trainer(max_epochs=2).fit(module, ones(4))
    expected = [0.1 * curves.cosine(t, total_steps=8, warmup=2) for t in range(8)]
    for step, lr in zip(module.optimizer.taken, expected, strict=True):
        assert [taken for taken, _ in step] == pytest.approx([lr * scale for scale in scales], rel=1e-14)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        pl_module.layer.bias.requires_grad_(False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            pl_module.layer.bias.requires_grad_(True)
            optimizer.add_param_group({"params": [pl_module.layer.bias], "lr": 4.0, "lr_scale": 0.5})


class Partly(Tiny):
    def configure_optimizers(self) -> Any:
        self.optimizer = Recorded([self.layer.weight], lr=1.0)
        return schedules.linear(self.optimizer, self)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
def test_a_group_unfrozen_in_a_fit_follows_from_its_own_base_also_resumed(tmp_path):
    def lrs(**kwargs: Any) -> list[list[float]]:
        module = Partly()
        run = trainer(max_epochs=3, callbacks=[Unfreeze(), SaveEverywhere(tmp_path)])
        run.fit(module, ones(4), **kwargs)
        return [[lr for lr, _ in step] for step in module.optimizer.taken]

    whole = lrs()
    assert whole[:4] == [[1 - t / 12] for t in range(4)]
    assert whole[4:] == [[1 - t / 12, 2 * (1 - t / 12)] for t in range(4, 12)]
    for step in (5, 6, 7, 9, 11):
        assert lrs(ckpt_path=tmp_path / f"{step}.ckpt", weights_only=False) == whole[step:], step


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # torch's, of a copied optimizer
def test_a_group_that_joins_takes_part_from_its_first_step_under_the_outer_curve():
    for wrap, copied in product([float, torch.tensor], [False, True]):
        adam = optimizer(wrap(1.0), kind=torch.optim.Adam, foreach=False)
        scheduler = scheduler_of(swa_tail(schedules.linear(adam, total_steps=8), start=4, swa_lr=0.25))
        scheduler = copy.deepcopy(scheduler) if copied else scheduler
        for _ in range(6):
            scheduler.optimizer.step()
            scheduler.step()
        scheduler.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": wrap(2.0)})
        scheduler.optimizer.step()
        assert [float(group["lr"]) for group in scheduler.optimizer.param_groups] == [0.25, 0.5]


class Around(timm.optim.Lookahead):
    """A class of its own, since torch prepares the hooks of a class for all of its optimizers."""

    def step(self, closure: Any = None) -> Any:
        return self._base_optimizer.step(closure)


def test_a_group_that_joins_a_wrapper_takes_part_from_the_first_step_of_all():
    around = Around(optimizer(1.0))
    scheduler_of(schedules.linear(around, total_steps=8, warmup=4))
    around.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 2.0})
    around.step()
    assert [group["lr"] for group in around.param_groups] == [0.25, 0.5]


def test_a_scheduler_continues_from_a_given_step():
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "initial_lr": 0.1}], lr=0.1)
    assert advance(CurveLR(optimizer, FLAT_COS, last_epoch=4), 3) == [0.1 * FLAT_COS(t) for t in (5, 6, 7)]


def test_the_state_of_another_scheduler_is_refused_by_name() -> None:
    theirs = torch.optim.lr_scheduler.StepLR(optimizer(), 3).state_dict()
    with pytest.raises(ValueError, match="another kind of scheduler than CurveLR, with 'step_size'"):
        start().load_state_dict(theirs)


def test_a_curve_that_cannot_be_pickled_is_refused() -> None:
    def local(step: float) -> float:
        return 1.0

    cases = [
        (TypeError, {"curve": curve}, r"curve must be .* can be pickled, .* functools\.partial, got ")
        for curve in (local, lambda step: 1.0, 0.5, None)
    ]
    cases += [
        (TypeError, {"momentum": 0.9}, r"momentum must be .* can be pickled, .*, got 0.9"),
        (ValueError, {"momentum": halved}, "momentum can be cycled where there is some, got SGD without"),
        (TypeError, {"last_epoch": 0.5}, "last_epoch must be int, got 0.5"),
        (ValueError, {"last_epoch": 3}, "last_epoch must be -1 for groups without an initial_lr, got 3"),
    ]
    assert_refused(lambda **settings: CurveLR(optimizer(), **{"curve": halved, **settings}), cases)
