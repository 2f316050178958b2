"""reduce_on_plateau in fits, resumed and in manual optimization, against rules written naively here."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_tricks.schedules import PlateauLR, UnknownTotalSteps, linear, reduce_on_plateau
from tests.few import few
from tests.nets import TORCH_2_9, SteppedByHand, Stream, trainer
from tests.refusals import assert_refused
from tests.schedules.recording import SaveEveryStep, Tiny, ones, optimizer, scheduler_of

SCRIPT = [5.0, 4.0, 4.5, 4.5, 3.0, 3.5, 3.5, 3.5, 3.5, 2.0]  # the metric of each epoch


class Scripted(Tiny):
    """Logs the metric of each epoch from a script."""

    def __init__(self, lr: float = 1.0, script: Any = SCRIPT, **settings: Any) -> None:
        super().__init__(lambda optimizer, module: reduce_on_plateau(optimizer, module, **settings), lr)
        self.script = script

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.script[self.current_epoch])


class ScriptedManual(SteppedByHand, Scripted):
    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step(self.trainer.callback_metrics["val_loss"])


def fit(module: Any, *, epochs: int = 10, ckpt_path: Any = None, **settings: Any) -> list[float]:
    run = trainer(max_epochs=epochs, **settings)
    more = {"weights_only": True} if ckpt_path else {}
    run.fit(module, ones(4), ones(1), ckpt_path=ckpt_path, **more)
    return module.optimizer.lrs


def expected(epochs: int, steps: int = 4, *, W: int = 0, factor: float = 0.1, patience: int = 10, floor: float = 0):
    """The learning rate of every step, by the rule of the docstring; the metric falls to improve."""
    taken, level, best, bad = [], 1.0, float("inf"), 0
    for metric in SCRIPT[:epochs]:
        for _ in range(steps):
            taken.append((len(taken) + 1) / W if len(taken) < W else level)
        if len(taken) < W:
            continue
        best, bad = (metric, 0) if metric < best * (1 - 1e-4) else (best, bad + 1)
        if bad > patience:
            level, bad = max(level * factor, floor), 0
    return taken


SETTINGS: list[dict[str, Any]] = [
    {},
    {"patience": 1, "factor": 0.5},
    {"patience": 0, "factor": 0.5},
    {"patience": 0, "factor": 0.5, "floor": 0.2},
    {"patience": 0, "factor": 0.5, "warmup": 6},
    {"patience": 0, "factor": 0.0, "warmup": 13, "floor": 0.25},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Scripted, ScriptedManual])
def test_a_fit_follows_the_rule_in_every_step(kind):
    for settings in SETTINGS:
        naive = {"W" if name == "warmup" else name: value for name, value in settings.items()}
        assert fit(kind(**settings)) == expected(10, **naive), settings


def test_a_maximum_is_what_the_negative_is_for_a_minimum():
    falling = fit(Scripted(patience=0, factor=0.5))
    assert fit(Scripted(patience=0, factor=0.5, mode="max", script=[1 / value for value in SCRIPT])) == falling
    assert len(set(falling)) > 3
    rising = fit(Scripted(patience=0, factor=0.5, mode="max"))
    assert rising[-1] == 0.5**8


def test_the_warmup_counts_optimizer_steps_under_accumulation():
    for warmup in (5, 0.25):
        module = Scripted(patience=0, factor=0.5, warmup=warmup, script=[1.0] * 10)
        taken = fit(module, accumulate_grad_batches=2)  # two steps an epoch, the warm-up ends in the third
        assert taken == [0.2, 0.4, 0.6, 0.8, *[1.0] * 4, *(0.5**n for n in range(1, 7) for _ in range(2))]


class Wrapper(torch.optim.Optimizer):
    """As timm's Lookahead, it takes hooks, and without further ado calls none in its first step."""

    def __init__(self, inside):
        self.inside, self.param_groups, self.defaults = inside, inside.param_groups, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure=None):
        self.inside.step()


class Closed(torch.optim.Optimizer):
    """Takes no hooks."""

    def __init__(self, inside):
        self.param_groups, self.defaults = inside.param_groups, {}

    def step(self, closure=None):
        pass


def test_a_warmup_counts_the_first_step_of_a_wrapper_and_leaves_gradients_alone():
    made = Wrapper(optimizer())
    (weight,) = made.param_groups[0]["params"]
    weight.grad = torch.ones_like(weight)
    scheduler = scheduler_of(reduce_on_plateau(made, warmup=3))
    assert weight.grad is not None
    for done in (1, 2, 3):
        made.step()
        assert scheduler.steps == done


def test_a_wrapper_needs_no_defaults():
    made = Wrapper(optimizer())
    del made.defaults
    scheduler = scheduler_of(reduce_on_plateau(made, warmup=3))
    made.step()
    assert scheduler.steps == 1


def test_a_warmup_needs_an_optimizer_that_takes_hooks():
    with pytest.raises(ValueError, match=r"warmup must be 0 for LightningSGD"):
        PlateauLR(LightningOptimizer(optimizer()), warmup=3)
    with pytest.raises(ValueError, match=r"does not call Optimizer\.__init__ and has no step hooks to follow, got 3"):
        reduce_on_plateau(Closed(optimizer()), warmup=3)
    assert scheduler_of(reduce_on_plateau(Closed(optimizer()))).warmup == 0


def test_a_warmup_of_a_fraction_of_a_step_reaches_the_base():
    assert fit(Scripted(warmup=2.5 / 20), epochs=5)[:4] == pytest.approx([1 / 2.5, 2 / 2.5, 1.0, 1.0])


def test_it_stands_beside_early_stopping_and_the_monitor_of_learning_rates(tmp_path):
    stop, monitor = EarlyStopping("val_loss", patience=3), LearningRateMonitor("step")
    module = Scripted(patience=1, factor=0.5)
    taken = fit(module, callbacks=[stop, monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert stop.stopped_epoch == 7
    assert taken == expected(8, patience=1, factor=0.5)
    assert monitor.lrs["lr-RecordingSGD"] == taken


def test_a_metric_that_is_not_logged_is_lightnings_error():
    with pytest.raises(MisconfigurationException, match=r"val_accuracy which is not available"):
        fit(Scripted(monitor="val_accuracy"))


def test_the_metric_counts_once_an_epoch_however_validations_come():
    for settings in ({"val_check_interval": 2}, {"check_val_every_n_epoch": None, "val_check_interval": 4}):
        assert fit(Scripted(patience=0, factor=0.5), **settings) == expected(10, patience=0, factor=0.5)


def test_only_epochs_with_validation_count():
    taken = fit(Scripted(patience=0, factor=0.5), check_val_every_n_epoch=2)
    level, best, naive = 1.0, float("inf"), []
    for epoch, metric in enumerate(SCRIPT):
        naive += [level] * 4
        if epoch % 2:
            level, best = (level, metric) if metric < best else (level / 2, best)
    assert taken == naive
    assert len(set(taken)) > 1


ENDLESS = DataLoader(Stream(repeat(torch.full((1,), 0.1))))


class ByValidation(Scripted):
    """Logs the metric of each validation from the script."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.script[self.validations])

    def on_validation_end(self) -> None:
        self.validations += 1

    validations = 0


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("batches", "settings"),
    [
        pytest.param(ENDLESS, {"val_check_interval": 4}, id="stream"),
        pytest.param(ENDLESS, {"val_check_interval": 4, "check_val_every_n_epoch": None}, id="by batches"),
        pytest.param(ones(48), {"val_check_interval": 4}, id="a long epoch"),
        pytest.param(ones(48), {"val_check_interval": 1 / 12}, id="parts of a long epoch"),
    ],
)
def test_validations_count_where_no_epoch_ends(batches: Any, settings: Any, accumulated: int) -> None:
    module, steps = ByValidation(patience=0, factor=0.5), 4 // accumulated
    settings = {"max_epochs": -1, "max_steps": 10 * steps, "accumulate_grad_batches": accumulated, **settings}
    trainer(**settings).fit(module, batches, ones(1))
    assert module.optimizer.lrs == expected(10, steps, patience=0, factor=0.5)
    assert len(set(module.optimizer.lrs)) > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 10}, r"max_steps=10 ends training before the first one, after 48 steps.*val_check_interval"),
        ({"max_steps": 20, "check_val_every_n_epoch": 2, "val_check_interval": 1.0}, "after 96 steps"),
        ({"max_steps": 9, "val_check_interval": 3, "accumulate_grad_batches": 2}, "got one after 3 batches"),
        ({"limit_val_batches": 0}, r"monitor='val_loss'\) needs a validation, and this fit has none"),
    ],
)
def test_a_schedule_that_would_never_step_is_refused_before_the_first_step(settings: Any, message: str) -> None:
    module = Scripted(patience=0)
    with pytest.raises(MisconfigurationException, match=message):
        trainer(**settings).fit(module, ones(48), ones(1))
    assert not module.optimizer.lrs


def test_a_metric_of_training_needs_no_validation() -> None:
    class Trained(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("train_loss", SCRIPT[self.current_epoch], on_epoch=True)
            return super().training_step(batch, batch_idx)

    schedule = partial(reduce_on_plateau, monitor="train_loss", patience=0, factor=0.5)
    module = Trained(schedule)
    trainer(max_epochs=10).fit(module, ones(4))
    assert module.optimizer.lrs == expected(10, patience=0, factor=0.5)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
@pytest.mark.parametrize("kind", few([Scripted, ScriptedManual], 1))
def test_a_resumed_fit_takes_the_same_learning_rates(tmp_path, kind):
    settings = {"patience": 0, "factor": 0.5, "warmup": 6, "floor": 0.01}
    whole = fit(kind(**settings), callbacks=[SaveEveryStep(tmp_path)])
    assert len(set(whole)) > 8
    for step in range(1, 40):
        if step % 4 == 0:
            continue  # at the end of an epoch the metric is not known any more
        resumed = fit(kind(**settings), ckpt_path=tmp_path / f"{step}.ckpt")
        exact = 40 if kind is ScriptedManual or step < 4 else 4 * (step // 4 + 1)
        assert resumed[: exact - step] == whole[step:exact], step
        assert len(resumed) == 40 - step


@pytest.mark.parametrize("warmup", [0.5, 20])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
def test_a_resumed_fit_has_the_warmup_that_it_is_given(tmp_path, warmup):
    fit(Scripted(warmup=0.25), callbacks=[SaveEveryStep(tmp_path)])
    with pytest.warns(UserWarning, match=r"'warmup': 10.* is not this run's, .*'warmup': 20.* followed") as caught:
        resumed = fit(Scripted(warmup=warmup), ckpt_path=tmp_path / "6.ckpt")
    assert resumed == pytest.approx([min(1.0, (step + 1) / 20) for step in range(6, 40)])
    assert len([each for each in caught if "followed from now on" in str(each.message)]) == 1
    assert fit(Scripted(warmup=0.25), ckpt_path=tmp_path / "6.ckpt")[0] == pytest.approx(0.7)  # which warns of nothing


def test_a_resumed_scheduler_takes_the_same_learning_rates_from_every_epoch():
    def start() -> PlateauLR:
        settings = {"factor": 0.5, "patience": 0, "floor": 0.1, "warmup": 6}
        return scheduler_of(reduce_on_plateau(optimizer(1.0, 0.25), **settings))

    def advance(scheduler: PlateauLR, epochs: range) -> list[list[float]]:
        taken = []
        for epoch in epochs:
            for _ in range(4):
                taken.append([group["lr"] for group in scheduler.optimizer.param_groups])
                scheduler.optimizer.step()
            scheduler.step(SCRIPT[epoch])
        return taken

    whole = advance(start(), range(10))
    for epoch in range(10):
        first, second = start(), start()
        advance(first, range(epoch))
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert advance(second, range(epoch, 10)) == whole[4 * epoch :]
        for twin in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
            assert twin.optimizer is not first.optimizer
            assert advance(twin, range(epoch, 10)) == whole[4 * epoch :]


def test_other_settings_are_followed_with_one_warning():
    first = scheduler_of(reduce_on_plateau(optimizer(), patience=0, factor=0.5))
    second = scheduler_of(reduce_on_plateau(optimizer(), patience=2, factor=0.25))
    first.step(1.0)
    with pytest.warns(UserWarning, match=r"'patience': 0.* is not this run's, .*'patience': 2.* followed") as caught:
        second.load_state_dict(first.state_dict())
    assert len(caught) == 1
    assert (second.best, second.patience, second.factor) == (1.0, 2, 0.25)
    upwards = scheduler_of(reduce_on_plateau(optimizer(), mode="max"))
    with pytest.warns(UserWarning, match=r"'mode': 'min'"):
        upwards.load_state_dict(first.state_dict())
    upwards.step(0.5)
    assert upwards.best == 0.5


def test_its_state_is_plain_data_even_from_numpy(tmp_path):
    numbers = {name: np.float64(0.1) for name in ("factor", "threshold", "floor")}
    scheduler = scheduler_of(reduce_on_plateau(optimizer(), warmup=3, **numbers))
    scheduler.step(torch.tensor(1.0))
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == scheduler.state_dict()


def test_the_state_of_another_scheduler_is_refused_by_name():
    theirs = scheduler_of(linear(optimizer(), total_steps=4)).state_dict()
    with pytest.raises(ValueError, match="another kind of scheduler than PlateauLR, with 'last_epoch', 'settings'"):
        PlateauLR(optimizer()).load_state_dict(theirs)


def test_torchs_own_state_is_taken_up():
    theirs = ReduceLROnPlateau(optimizer(), patience=3)
    theirs.step(2.0)
    ours = PlateauLR(optimizer(), patience=3)
    ours.load_state_dict(theirs.state_dict())
    assert (ours.best, ours.last_epoch, ours.steps) == (2.0, 1, 0)


@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_every_group_has_its_own_base_and_floor_also_one_that_joins(wrap):
    mine = optimizer(*map(wrap, (1.0, 1.0, 1.0)), kind=torch.optim.Adam, foreach=False)
    mine.param_groups[1]["lr_scale"] = 0.5
    mine.param_groups[2]["max_lr"] = wrap(4.0)
    tensors = [group["lr"] for group in mine.param_groups]
    scheduler = scheduler_of(reduce_on_plateau(mine, factor=0.5, patience=0, warmup=4, floor=0.25))
    seen = [[float(group["lr"]) for group in mine.param_groups]]
    for step in range(6):
        if step in (2, 5):  # in the warm-up and behind it
            joins = {"params": [torch.nn.Parameter(torch.ones(1))], "lr": wrap(8.0), "lr_scale": 0.25}
            mine.add_param_group(joins)
        mine.step()
        seen.append([float(group["lr"]) for group in mine.param_groups])
    base = [1.0, 0.5, 4.0, 2.0, 2.0]
    assert seen[:3] == [[f * lr for lr in base[:3]] for f in (0.25, 0.5, 0.75)]
    assert seen[3:] == [base[:4], base[:4], base[:4], base]
    for metric in (1.0, 1.0, 1.0, 1.0, 1.0):
        scheduler.step(metric)
    assert [float(group["lr"]) for group in mine.param_groups] == [lr / 4 for lr in base]
    if wrap is torch.tensor and not TORCH_2_9:  # which puts others in their place
        assert all(group["lr"] is tensor for group, tensor in zip(mine.param_groups, tensors, strict=False))


def test_a_step_counts_once_also_where_torch_calls_the_hooks_of_a_parents_step_too():
    class Child(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer()  # from the first SGD on its own step calls hooks, and so do its children's
    mine = optimizer(kind=Child)
    scheduler = PlateauLR(mine, warmup=8)
    for _ in range(3):
        mine.step()
    assert (scheduler.steps, mine.param_groups[0]["lr"]) == (3, 0.5)


def test_a_wrong_value_is_named():
    mine = optimizer()
    cases = [
        (TypeError, {"monitor": 3}, r"monitor must be str, got 3"),
        (ValueError, {"mode": "mx"}, r"mode must be one of 'min', 'max', got 'mx'"),
        (ValueError, {"factor": 1.0}, r"factor must be in \[0.0, 1.0\), got 1.0"),
        (TypeError, {"factor": "0.1"}, r"factor must be a number .* got '0.1'"),
        (ValueError, {"patience": -1}, r"patience must be .*, got -1"),
        (TypeError, {"patience": 2.5}, r"patience must be an integer, got 2.5"),
        (TypeError, {"patience": False}, r"patience must be an integer, got False"),
        (ValueError, {"threshold": -1.0}, r"threshold must be .*, got -1.0"),
        (ValueError, {"floor": 2}, r"floor must be in \[0.0, 1.0\], got 2"),
        (ValueError, {"warmup": 1.5}, r"warmup must be .*, got 1.5"),
        (TypeError, {"warmup": True}, r"warmup must be .*, got True"),
        (UnknownTotalSteps, {"warmup": 0.5}, r"neither module nor total_steps"),
    ]
    assert_refused(partial(reduce_on_plateau, mine), cases)
    assert "initial_lr" not in mine.param_groups[0]


def test_arguments_in_the_wrong_order_are_named():
    with pytest.raises(TypeError, match="optimizer must be a torch Optimizer"):
        reduce_on_plateau(Tiny(), optimizer())
    with pytest.raises(TypeError, match="module must be a LightningModule, got str"):
        reduce_on_plateau(optimizer(), "val_loss")
