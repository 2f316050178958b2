"""LRSchedule equals the factory of the same name, in Python and from YAML."""

from __future__ import annotations

import re
import sys
from functools import partial
from inspect import isfunction, signature
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.scheduler import CosineLRScheduler
from torch.optim import SGD, lr_scheduler

import lightning_tricks as lt
from lightning_tricks import LRSchedule, schedules
from lightning_tricks.callbacks import lr_schedule
from tests.core.averaging.test_coordinator import Wrapper
from tests.few import few
from tests.nets import Net, PlainNet, assert_equal, build, fit, loader, trained, trainer, weights
from tests.refusals import assert_refused
from tests.schedules.recording import SaveEveryStep, Tiny, ones
from tests.schedules.test_plateau import SCRIPT, expected

CURVES = {
    "constant": {"warmup": 3},
    "cosine": {"warmup": 0.2, "floor": 0.1},
    "cosine_restarts": {"cycles": 2, "growth": 2.0},
    "flat_cos": {"warmup": 2, "flat": 0.5},
    "inverse_sqrt": {"warmup": 0.25, "floor": 0.5},
    "linear": {"total_steps": 20},
    "one_cycle": {"initial": 0.1, "momentum": [0.8, 0.9]},
    "polynomial": {"power": 2},
    "reduce_on_plateau": {"warmup": 3, "factor": 0.5, "patience": 0, "threshold": 0.9, "monitor": "train_loss"},
    "step_decay": {"milestones": [4, 0.75], "gamma": 0.5},
    "swa_tail": {"of": "wsd", "warmup": 1, "shape": "linear", "start": 0.5, "swa_lr": 0.02, "anneal": 2},
    "wsd": {"warmup": 1, "cooldown": 0.5, "shape": "cosine"},
}


NEEDED = {"swa_tail": {"of": "cosine", "swa_lr": 0.05}}  # what a factory needs besides an optimizer and a module
TAIL = ("start", "swa_lr", "anneal")


def by_factory(name: str, optimizer: Any, module: Any, **settings: Any) -> Any:
    """What the factory of a name returns in ``configure_optimizers``."""
    if name != "swa_tail":
        return getattr(schedules, name)(optimizer, module, **settings)
    tail = {setting: settings.pop(setting) for setting in TAIL if setting in settings}
    return schedules.swa_tail(getattr(schedules, settings.pop("of"))(optimizer, module, **settings), **tail)


class WithFactory(Net):
    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        self.factory = partial(by_factory, name, **settings)

    def configure_optimizers(self) -> Any:
        return self.factory(super().configure_optimizers(), self)


def test_every_factory_is_a_curve_of_the_callback():
    curves = {name for name, value in vars(schedules.curves).items() if isfunction(value) and name[0] != "_"}
    assert set(schedules.factories.CURVES) == curves - {"one_cycle_momentum", "swa_tail"}
    returned = {name: getattr(schedules, name).__annotations__.get("return") for name in schedules.__all__}
    factories = {name for name, kind in returned.items() if kind == "Schedule"}
    assert set(CURVES) == set(lr_schedule._FACTORIES) == factories
    options = {name for name in signature(schedules.swa_tail).parameters if name != "schedule"}
    assert options == lr_schedule._options("swa_tail") - {"of", "total_steps"}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CURVES)
def test_it_trains_bit_equal_to_the_factory_of_its_name(name):
    for settings in (NEEDED.get(name, {}), CURVES[name]):
        with_factory, with_callback = build(WithFactory, name=name, **settings), build()
        expected = fit(with_factory).lr_scheduler_configs
        run = fit(with_callback, callbacks=[LRSchedule(name, **settings)])
        assert_equal(weights(with_factory), weights(with_callback))
        ((config,), (theirs,)) = run.lr_scheduler_configs, expected
        assert config.scheduler.state_dict() == theirs.scheduler.state_dict()
        assert {**vars(config), "scheduler": None} == {**vars(theirs), "scheduler": None}
        steps = config.scheduler.steps if name == "reduce_on_plateau" else config.scheduler.last_epoch
        assert steps == run.global_step == 12


def lrs(callbacks: list[Any], *args: Any, epochs: int = 2, **kwargs: Any) -> list[float]:
    module = Tiny()
    trainer(max_epochs=epochs, callbacks=callbacks).fit(module, ones(6), *args, **kwargs)
    return module.optimizer.lrs


def test_it_follows_the_curve_in_every_step():
    assert lrs([LRSchedule("linear")]) == [1 - t / 12 for t in range(12)]
    curve = schedules.curves.one_cycle  # keeps its own warmup
    assert lrs([LRSchedule("one_cycle")]) == [curve(t, total_steps=12) for t in range(12)]


# -- a metric, and a tail ---------------------------------------------------------------------------------------------


class Scripted(Tiny):
    """Logs the metric of each epoch, with or without a schedule of its own."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", -SCRIPT[self.current_epoch])


PLATEAU: dict[str, Any] = {"monitor": "score", "mode": "max", "factor": 0.5, "patience": 0, "warmup": 6, "floor": 0.01}


def scripted(*callbacks: Any, factory: Any = lambda optimizer, module: optimizer, **kwargs: Any) -> list[float]:
    """The learning rates of ten epochs of four steps."""
    settings = {name: kwargs.pop(name) for name in ("check_val_every_n_epoch", "val_check_interval") if name in kwargs}
    module = Scripted(factory)
    trainer(max_epochs=10, callbacks=[*callbacks], **settings).fit(module, ones(4), ones(1), **kwargs)
    return module.optimizer.lrs


def test_a_plateau_of_the_monitored_metric_reduces():
    assert scripted(LRSchedule("reduce_on_plateau", **PLATEAU)) == expected(10, W=6, factor=0.5, patience=0, floor=0.01)


def test_a_plateau_is_stepped_in_the_epochs_in_which_that_of_the_factory_is():
    for settings in ({"check_val_every_n_epoch": 2}, {"check_val_every_n_epoch": None, "val_check_interval": 4}):
        ours = scripted(LRSchedule("reduce_on_plateau", **PLATEAU), **settings)
        assert ours == scripted(factory=partial(schedules.reduce_on_plateau, **PLATEAU), **settings)
        assert ours[-1] < 1


def test_a_metric_that_is_not_logged_is_lightnings_error():
    with pytest.raises(MisconfigurationException, match="val_loss which is not available"):
        scripted(LRSchedule("reduce_on_plateau"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
def test_a_plateau_is_resumed_as_that_of_the_factory(tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    factory = partial(schedules.reduce_on_plateau, **PLATEAU)
    whole = scripted(LRSchedule("reduce_on_plateau", **PLATEAU), SaveEveryStep(tmp_path / "ours"))
    assert scripted(SaveEveryStep(tmp_path / "theirs"), factory=factory) == whole
    assert len(set(whole)) > 8
    for step in (1, 3, 5, 6, 7, 13, 17, 18, 20, 23):
        mine, other = ({"ckpt_path": tmp_path / name / f"{step}.ckpt"} for name in ("ours", "theirs"))
        ours = scripted(LRSchedule("reduce_on_plateau", **PLATEAU), **mine, weights_only=True)
        assert ours == scripted(factory=factory, **other, weights_only=True)
        # Lightning itself leaves out the metric of the epoch that a run is resumed in
        assert len(ours) == 40 - step
        exact = 0 if step % 4 == 0 else 40 if step < 4 else 4 * (step // 4 + 1)
        assert ours[: max(0, exact - step)] == whole[step : max(step, exact)]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
def test_a_plateau_added_on_resume_stands_where_training_stands(tmp_path):
    scripted(SaveEveryStep(tmp_path))
    warm = scripted(LRSchedule("reduce_on_plateau", monitor="score", warmup=13), ckpt_path=tmp_path / "9.ckpt")
    assert warm == [*(pytest.approx(t / 13) for t in (10, 11, 12)), *[1.0] * 28]
    past = scripted(LRSchedule("reduce_on_plateau", monitor="score", warmup=4), ckpt_path=tmp_path / "9.ckpt")
    assert past == [1.0] * 31


def test_the_tail_goes_behind_a_constant_rate_or_another_curve():
    assert lrs([LRSchedule("swa_tail", swa_lr=0.25)]) == [*[1.0] * 9, *[0.25] * 3]
    warmed = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lrs([LRSchedule("swa_tail", swa_lr=0.25, warmup=4, start=6)]) == [*warmed, *[0.25] * 6]
    fallen = [1 - t / 12 for t in range(6)]
    assert lrs([LRSchedule("swa_tail", of="linear", start=0.5, swa_lr=0.25, anneal=0)]) == [*fallen, *[0.25] * 6]
    annealed = lrs([LRSchedule("swa_tail", of="inverse_sqrt", floor=1.0, start=4, swa_lr=0.5, anneal=0.25)])
    assert annealed == pytest.approx([1.0] * 5 + [0.5 + 0.25 * (1 + cos(pi * t / 3)) for t in (1, 2)] + [0.5] * 5)


def test_a_tail_in_steps_behind_an_endless_curve_needs_no_total():
    callback = LRSchedule("swa_tail", start=2, swa_lr=0.25)
    module = Tiny()
    trainer(max_steps=4, max_time="00:01:00:00", callbacks=[callback]).fit(module, ones(6))
    assert module.optimizer.lrs == [1.0, 1.0, 0.25, 0.25]
    with pytest.raises(schedules.UnknownTotalSteps, match="max_time"):
        trainer(max_time="00:01:00:00", callbacks=[LRSchedule("swa_tail", swa_lr=0.25)]).fit(Tiny(), ones(6))
    told = LRSchedule("swa_tail", swa_lr=0.25, total_steps=4)
    trainer(max_steps=4, max_time="00:01:00:00", callbacks=[told]).fit(module, ones(6))
    assert module.optimizer.lrs == [1.0, 1.0, 1.0, 0.25]


# -- beside others ----------------------------------------------------------------------------------------------------


def test_the_learning_rate_monitor_sees_it(tmp_path):
    monitor, module = LearningRateMonitor("step"), Tiny()
    callbacks = [LRSchedule("linear"), monitor]
    trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1, callbacks=callbacks).fit(module, ones(4))
    assert monitor.lrs == {"lr-RecordingSGD": module.optimizer.lrs}


class Manual(Net):
    automatic_optimization = False


def test_validation_alone_needs_no_schedule():
    trainer(callbacks=[LRSchedule()]).validate(Manual(), loader(24), verbose=False)


def test_a_wrong_argument_is_refused_at_once():
    tail, metric, cycle = {"curve": "swa_tail", "swa_lr": 0.1}, {"curve": "reduce_on_plateau"}, {"curve": "one_cycle"}
    has = "anneal, floor, of, start, swa_lr, warmup"
    cases = [
        (ValueError, {"curve": "flat_cosine"}, r"must be one of .*, got 'flat_cosine'. Did you mean .flat_cos.\?"),
        (TypeError, {"curve": "step_decay", "milestones": 5}, "milestones must be a list of ints .*, got 5"),
        (TypeError, {"curve": "step_decay", "milestones": [None]}, "milestones must be an int .*, got None"),
        (ValueError, {"curve": "wsd", "shape": "cos"}, "shape must be one of .*, got 'cos'"),
        (ValueError, {**cycle, "momentum": [0.9, 0.8]}, "lowest first .*: swap them"),
        (TypeError, {**cycle, "momentum": 0.9}, "momentum must be two numbers, .* got 0.9"),
        (TypeError, {**cycle, "start": 0.1}, "'one_cycle' has no option start; it has floor, initial, mom"),
        (ValueError, {"curve": "cosine_restarts", "cycles": 0}, "cycles must be at least 1, got 0"),
        (TypeError, {"peak": 2}, "curve 'flat_cos' has no option peak; it has flat, floor, warmup"),
        (TypeError, {"curve": "cosine", "flat": 0.5}, "curve 'cosine' has no option flat; it has floor, warmup"),
        (TypeError, {"of": "cosine"}, "curve 'flat_cos' has no option of; it has flat, floor, warmup"),
        (ValueError, {"warmup": -1}, "warmup must be .*, got -1"),
        (TypeError, {"warmup": True}, "warmup must be .*, got True"),
        (ValueError, {"flat": 1.5}, "flat must be .*, got 1.5"),
        (ValueError, {"floor": 2}, r"floor must be in \[0.0, 1.0\], got 2"),
        (ValueError, {"total_steps": 0}, "total_steps must be at least 1, got 0"),
        (TypeError, {**metric, "total_steps": 9}, "'reduce_on_plateau' has no option total_steps; it has factor, fl"),
        (TypeError, {**metric, "monitor": 3}, "monitor must be str, got 3"),
        (ValueError, {**metric, "mode": "up"}, "mode must be one of 'min', 'max', got 'up'"),
        (ValueError, {**metric, "factor": 1}, r"factor must be in \[0.0, 1.0\), got 1"),
        (TypeError, {**metric, "patience": 0.5}, "patience must be an integer, got 0.5"),
        (ValueError, {**metric, "threshold": -1}, r"threshold must be in \[0.0, inf\), got -1"),
        (TypeError, {"curve": "swa_tail"}, "'swa_tail' must have swa_lr, .* got none: pass swa_lr="),
        (TypeError, {"curve": "swa_tail", "swa_lr": None}, "'swa_tail' must have swa_lr, .* got none: pass swa_lr="),
        (ValueError, {**tail, "of": "swa_tail"}, "of must be one of 'constant', .*, got 'swa_tail'"),
        (ValueError, {**tail, "of": 3}, "of must be one of 'constant', .*, got 3"),
        (TypeError, {**tail, "flat": 0.5}, f"'swa_tail' has no option flat; it has {has}"),
        (ValueError, {**tail, "of": "flat_cos", "flat": 1.5}, "flat must be .*, got 1.5"),
        (ValueError, {**tail, "swa_lr": -1}, r"swa_lr must be in \[0.0, inf\), got -1"),
        (TypeError, {**tail, "anneal": "1"}, "anneal must be an int .*, got '1'"),
    ]
    assert_refused(LRSchedule, cases)


class WithPlateau(Net):
    def configure_optimizers(self) -> Any:
        return schedules.reduce_on_plateau(super().configure_optimizers(), self)


def test_two_schedules_are_refused_by_name():
    cases = [
        (partial(WithFactory, "cosine"), [], "and CurveLR from configure_optimizers: both set the learning rate"),
        (WithPlateau, [], r"and PlateauLR from configure_optimizers: both .*Remove one of them"),
        (Net, [LRSchedule("cosine")], r"and LRSchedule\(curve='cosine'\): both.* Remove one"),
    ]
    for kind, others, message in cases:
        with pytest.raises(MisconfigurationException, match=rf"LRSchedule\(curve='linear'\) {message}"):
            fit(build(kind), callbacks=[LRSchedule("linear"), *others])


def test_manual_optimization_is_refused():
    calls = {
        LRSchedule("cosine"): "lightning_tricks.cosine(optimizer, total_steps=...).",
        LRSchedule("reduce_on_plateau"): "lightning_tricks.reduce_on_plateau(optimizer, self).",
        LRSchedule("swa_tail", swa_lr=0.1): (
            "lightning_tricks.swa_tail(lightning_tricks.constant(optimizer, total_steps=...), swa_lr=0.1)."
        ),
    }
    for callback, call in calls.items():
        message = rf"Manual.automatic_optimization is False.*{re.escape(call)}$"
        with pytest.raises(MisconfigurationException, match=message):
            fit(Manual(), callbacks=[callback])


class CLINet(Net):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(24)


QUIET = """
seed_everything: 7
trainer:
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  max_epochs: 2
  num_sanity_val_steps: 0
  callbacks:
"""


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """LightningCLI with a callback in its YAML file."""
    monkeypatch.setattr(sys, "argv", ["cli"])  # the CLI warns if it sees pytest's arguments
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning calls jsonargparse the old way

    def build_cli(callback: str, *args: str, **settings: Any) -> LightningCLI:
        (tmp_path / "config.yaml").write_text(f"{QUIET}  - {callback}\n")
        args = (*args, f"--config={tmp_path / 'config.yaml'}")
        return LightningCLI(CLINet, args=list(args), save_config_callback=None, **settings)

    return build_cli


def callback_of(tool: LightningCLI) -> LRSchedule:
    return next(callback for callback in tool.trainer.callbacks if isinstance(callback, LRSchedule))


DECAYS = "dict_kwargs: {milestones: [3, 0.5], gamma: 0.5}"
YAML = {
    "": LRSchedule(),
    "init_args: {curve: cosine, warmup: 5}": LRSchedule("cosine", warmup=5),
    "init_args: {warmup: 0.05, floor: 0.01, total_steps: 9}": LRSchedule(warmup=0.05, floor=0.01, total_steps=9),
    "init_args: {curve: flat_cos}, dict_kwargs: {flat: 0.5}": LRSchedule(flat=0.5),
    f"init_args: {{curve: step_decay}}, {DECAYS}": LRSchedule("step_decay", milestones=[3, 0.5], gamma=0.5),
    "init_args: {curve: wsd}, dict_kwargs: {cooldown: 4, shape: linear}": LRSchedule("wsd", cooldown=4, shape="linear"),
    "init_args: {curve: one_cycle}, dict_kwargs: {momentum: [0.8, 0.9]}": LRSchedule("one_cycle", momentum=[0.8, 0.9]),
    "init_args: {curve: cosine_restarts}, dict_kwargs: {cycles: 2, growth: 2}": (
        LRSchedule("cosine_restarts", cycles=2, growth=2)
    ),
    "init_args: {curve: polynomial}, dict_kwargs: {power: 2.0}": LRSchedule("polynomial", power=2.0),
    "init_args: {curve: reduce_on_plateau, warmup: 3}, dict_kwargs: {monitor: acc, mode: max}": (
        LRSchedule("reduce_on_plateau", warmup=3, monitor="acc", mode="max")
    ),
    "init_args: {curve: swa_tail, warmup: 3}, dict_kwargs: {of: wsd, cooldown: 4, swa_lr: 0.1}": (
        LRSchedule("swa_tail", warmup=3, of="wsd", cooldown=4, swa_lr=0.1)
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("class_path", ["lightning_tricks.LRSchedule", "LRSchedule"])
def test_it_is_built_from_yaml(cli, class_path):
    for arguments, callback in YAML.items():
        found = callback_of(cli(f"{{class_path: {class_path}, {arguments}}}", run=False))
        settings = callback.curve, callback.total_steps, callback.settings
        assert (found.curve, found.total_steps, found.settings) == settings


def test_yaml_tells_one_step_from_the_whole_of_training(cli):
    for warmup in ("1", "1.0"):
        tool = cli(f"{{class_path: LRSchedule, init_args: {{warmup: {warmup}}}}}", run=False)
        assert repr(callback_of(tool).settings) == f"{{'warmup': {warmup}}}"


def test_it_trains_from_the_command_line(cli):
    tool = cli("{class_path: LRSchedule, init_args: {curve: linear, warmup: 4}}", "fit")
    (config,) = tool.trainer.lr_scheduler_configs
    settings = {"curve": "linear", "total_steps": 12, "warmup": 4, "floor": 0.0}
    assert config.scheduler.state_dict() == {"last_epoch": 12, "settings": settings}


def test_options_train_from_the_command_line(cli):
    tool = cli(f"{{class_path: LRSchedule, init_args: {{curve: step_decay}}, {DECAYS}}}", "fit")
    (config,) = tool.trainer.lr_scheduler_configs
    assert config.scheduler.settings["milestones"] == (3.0, 6.0)
    assert tool.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_a_metric_and_a_tail_train_from_the_command_line(cli):
    options = "{monitor: train_loss, factor: 0.5, patience: 0, threshold: 0.9}"
    tool = cli(f"{{class_path: LRSchedule, init_args: {{curve: reduce_on_plateau}}, dict_kwargs: {options}}}", "fit")
    assert tool.trainer.optimizers[0].param_groups[0]["lr"] == 0.05  # the second epoch was not ten times as good
    tool = cli("{class_path: LRSchedule, init_args: {curve: swa_tail}, dict_kwargs: {swa_lr: 0.02}}", "fit")
    assert tool.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02)


def test_milestones_out_of_order_are_refused_when_training_starts():
    with pytest.raises(ValueError, match=r"milestones must come in order, .*, got \[0.5, 3\] \(6, 3 of 12 steps\)"):
        fit(build(), callbacks=[LRSchedule("step_decay", milestones=[0.5, 3])])


def test_a_schedule_added_on_resume_stands_where_training_stands(tmp_path: Any) -> None:
    fit(build(), max_epochs=2).save_checkpoint(tmp_path / "x.ckpt")
    run = fit(build(), callbacks=[LRSchedule("linear")], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 24
    assert run.optimizers[0].param_groups[0]["lr"] == 0


# -- learning rates that something else sets --------------------------------------------------------------------------


class Flat(PlainNet):
    """Without a schedule."""


class Constant(PlainNet):
    def configure_optimizers(self) -> Any:
        return schedules.constant(super().configure_optimizers(), self, warmup=3)


class Falls(PlainNet):
    def configure_optimizers(self) -> Any:
        return schedules.wsd(super().configure_optimizers(), self, warmup=3, cooldown=6)


BRANCHES: dict[str, tuple[type[PlainNet], dict[str, Any]]] = {  # the module of the long run, and what the branch adds
    "no schedule": (Flat, {"curve": "wsd"}),
    "a constant rate": (Constant, {"curve": "wsd", "warmup": 3, "replace": True}),
    "wsd for a longer training": (Falls, {}),
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The schedule of the checkpoint, .* 'constant'")  # of the branch
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", few(BRANCHES, 1))
def test_a_cooldown_branches_from_a_checkpoint_as_if_it_had_been_planned(name, accumulate, tmp_path):
    kind, added = BRANCHES[name]

    def ended(steps: int, *callbacks: Any, cooldown: int = 6, **settings: Any) -> Any:
        torch.manual_seed(1)  # of the order of the samples
        settings |= {"max_epochs": -1, "max_steps": steps, "accumulate_grad_batches": accumulate}
        branch = [LRSchedule(**added, cooldown=cooldown)] if added and steps < 90 else []
        return trained(kind, lt.ExactResume(), *branch, *callbacks, train=loader(shuffle=True), **settings)

    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=14, save_top_k=-1)  # amid an epoch
    ended(90, save, enable_checkpointing=True)
    for step, cooldown in ((14, 6), (28, 6), (14, 4)):
        if name == "wsd for a longer training" and cooldown != 6:
            continue
        rates = LearningRates()
        planned = ended(step + cooldown, cooldown=cooldown)
        branch = ended(step + cooldown, rates, cooldown=cooldown, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert_equal(branch, planned)
        assert rates.seen == pytest.approx([0.1 * (1 - (place / cooldown) ** 0.5) for place in range(cooldown)])


class LearningRates(Callback):
    """The learning rate of every optimizer step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


class SetsRates(PlainNet):
    """Writes the learning rate itself, from one of its hooks."""

    where = "training_step"

    def _write(self, where: str) -> None:
        if where == self.where and self.global_step == 2:
            for group in self.optimizers().param_groups:
                group["lr"] = 0.05

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._write("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, *_: Any) -> None:
        self._write("on_train_batch_start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._write("on_before_optimizer_step")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        self._write("optimizer_step")
        optimizer.step(closure=closure)
        if self.where == "after":
            optimizer.param_groups[0]["lr"] = 0.05


HOOKS = [(hook, 2) for hook in ("training_step", "on_train_batch_start", "optimizer_step")]


@pytest.mark.parametrize("curve", ["cosine", "reduce_on_plateau"])
@pytest.mark.parametrize(("where", "step"), [*HOOKS, ("on_before_optimizer_step", 3), ("after", 1)])
def test_a_learning_rate_that_the_module_writes_is_refused(curve, where, step):
    module = build(SetsRates)
    module.where = where
    message = rf"LRSchedule\('{curve}'\) has set .* group 0 to 0\.\S+, and SetsRates or a callback has set it to 0.05"
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[LRSchedule(curve)])
    assert module.trainer.global_step == step


class TensorRate(SetsRates):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.1))


def test_a_learning_rate_that_is_a_tensor_is_compared_too():
    with pytest.raises(MisconfigurationException, match="TensorRate or a callback has set"):
        fit(build(TensorRate), callbacks=[LRSchedule("cosine")])
    module = build(TensorRate)
    module.where = ""
    fit(module, callbacks=[LRSchedule("cosine", warmup=2)])


class StepsByHand(PlainNet):
    """Keeps a schedule to itself and steps it in every batch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = self.make(optimizer)
        return ([optimizer], [self.schedule]) if self.returns else optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        self.schedule.step()


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("name", ["OneCycleLR", "StepLR"])
def test_a_schedule_that_the_module_steps_by_hand_is_refused(name, returns):
    settings = {"max_lr": 1.0, "total_steps": 12} if name == "OneCycleLR" else {"step_size": 1}
    module = build(StepsByHand)
    module.make, module.returns = partial(getattr(torch.optim.lr_scheduler, name), **settings), returns
    with pytest.raises(MisconfigurationException, match=rf"StepsByHand steps {name} itself beside LRSchedule\('wsd'\)"):
        fit(module, callbacks=[LRSchedule("wsd", replace=returns)])
    assert module.trainer.global_step == 1


class StepsOurs(PlainNet):
    """Steps whatever schedule Lightning has."""

    def on_train_batch_end(self, *_: Any) -> None:
        schedule = self.lr_schedulers()
        schedule.step(*([1.0] if isinstance(schedule, schedules.PlateauLR) else []))


class MakesAnew(PlainNet):
    """Makes its optimizers anew in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


class OwnOptimizer(PlainNet):
    """Steps an optimizer that Lightning does not know."""

    def configure_optimizers(self) -> None:
        self.mine = super().configure_optimizers()

    def on_after_backward(self) -> None:
        self.mine.step()


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("curve", ["cosine", "reduce_on_plateau"])
@pytest.mark.parametrize(
    ("kind", "message", "step"),
    [
        (StepsOurs, "StepsOurs steps the schedule of {} itself, which Lightning steps", 1),
        (MakesAnew, "MakesAnew has made its optimizers anew, and {} schedules the earlier one", 6),
        (OwnOptimizer, r"{} needs the optimizer of OwnOptimizer.configure_optimizers, which has returned none", 0),
    ],
)
def test_a_schedule_that_would_do_something_else_is_refused(kind, message, step, curve):
    module = build(kind)
    with pytest.raises(MisconfigurationException, match=message.format(rf"LRSchedule\('{curve}'\)")):
        fit(module, callbacks=[LRSchedule(curve)])
    assert module.trainer.global_step == step


class Wrapped(PlainNet):
    def configure_optimizers(self) -> Any:
        return Wrapper(super().configure_optimizers())


NARROW: dict[str, Any] = {"monitor": "train_loss", "patience": 0, "threshold": 0.9}


def test_an_optimizer_without_hooks_is_scheduled():
    plateau = {"curve": "reduce_on_plateau", **NARROW}
    for settings in ({"curve": "cosine", "warmup": 3}, plateau):
        assert_equal(trained(Wrapped, LRSchedule(**settings)), trained(PlainNet, LRSchedule(**settings)))
    with pytest.raises(ValueError, match=r"warmup must be 0 for Wrapper, which does not call Optimizer.__init__"):
        fit(build(Wrapped), callbacks=[LRSchedule(**plateau, warmup=2)])


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "other",
    [
        lambda: LearningRateFinder(num_training_steps=5),
        lambda: lt.GradualUnfreeze(at=[3], parameters=[r"^layers\.0"], lr_factor=0.5),
        lambda: lt.BatchSizeWarmup(initial=2, final=8),
        lt.RewindOnSpike,
        lambda: lt.SWA(start=0.5),
        LearningRateMonitor,
    ],
)
@pytest.mark.parametrize("curve", ["cosine", "reduce_on_plateau"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.filterwarnings("ignore:.*")
def test_beside_callbacks_that_touch_learning_rates_or_groups(tmp_path, other, curve, first):
    callbacks = [LRSchedule(curve, warmup=3, **(NARROW if curve == "reduce_on_plateau" else {})), other()]
    places = {"default_root_dir": tmp_path, "logger": CSVLogger(tmp_path)}
    assert fit(build(PlainNet), callbacks=callbacks if first else callbacks[::-1], **places).global_step > 0


def test_beside_a_batch_size_that_scales_the_learning_rate():
    grows = lt.BatchSizeWarmup(initial=2, final=8, lr_rule="linear")
    run = fit(build(PlainNet), callbacks=[LRSchedule("cosine", warmup=3), grows], log_every_n_steps=1)
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == run.global_step == 4


@pytest.mark.parametrize("curve", ["cosine", "reduce_on_plateau"])
def test_beside_a_rewind_that_scales_the_learning_rate(curve):
    class Spike(PlainNet):
        batches = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches += 1
            return super().training_step(batch, batch_idx) * (float("nan") if self.batches == 9 else 1.0)

    rewind = lt.RewindOnSpike(every_n_steps=2, lr_factor=0.5, lr_steps=3)
    settings = {"monitor": "train_loss"} if curve == "reduce_on_plateau" else {}
    run = fit(build(Spike), callbacks=[LRSchedule(curve, warmup=4, **settings), rewind], max_epochs=4)
    scheduler = run.lr_scheduler_configs[0].scheduler
    assert (scheduler.steps if curve == "reduce_on_plateau" else scheduler.last_epoch) == run.global_step == 23


# -- a length that is not known ---------------------------------------------------------------------------------------


def test_a_length_that_is_not_known_is_refused_by_name():
    said = "cosine needs the number of optimizer steps of {}: the training loader of {} is reloaded and can"
    reloads = {"reload_dataloaders_every_n_epochs": 1}
    with pytest.raises(schedules.UnknownTotalSteps) as caught:
        fit(build(WithFactory, name="cosine"), **reloads)
    assert str(caught.value).startswith(said.format("WithFactory", "DataLoader"))

    class Loads(PlainNet):
        def train_dataloader(self) -> Any:
            return loader()

    with pytest.raises(schedules.UnknownTotalSteps) as caught:
        trainer(callbacks=[LRSchedule("cosine")], **reloads).fit(build(Loads), val_dataloaders=loader())
    assert str(caught.value).startswith("LRSchedule('cosine'): " + said.format("Loads", "Loads"))
    assert str(caught.value).endswith(
        "reload_dataloaders_every_n_epochs=1; pass total_steps=..., or end training by Trainer(max_steps=...) in place"
        " of max_epochs."
    )


# -- replace=True: what a library ships leaves no trace in the learning rates, the momenta or the weights --------------


class Two(PlainNet):
    """Two groups, of which one has settings of its own, and no schedule."""

    def optimizer(self) -> SGD:
        first, last = self.layers[0].parameters(), self.layers[-1].parameters()
        return SGD([{"params": first}, {"params": last, "lr": 0.02, "momentum": 0.5}], lr=0.1, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.optimizer()


class OneCycle(Two):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Lists(Two):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [lr_scheduler.CyclicLR(optimizer, base_lr=0.001, max_lr=3.0)]


class Several(Two):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
        return [optimizer], [warm, lr_scheduler.StepLR(optimizer, 1, gamma=0.1)]


class OwnPlateau(Two):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "train_loss"}


class Timm(Two):
    """Steps the scheduler in a way of its own, which would set back another one."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = CosineLRScheduler(optimizer, t_initial=2, warmup_t=1, warmup_lr_init=1e-5)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


class Rates(Callback):
    """The learning rates and momenta of every step."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[float, float]]] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])


def run_of(kind: type[Net], *callbacks: Callback, **settings: Any) -> tuple[list[Any], dict[str, Any]]:
    module, rates = build(kind), Rates()
    fit(module, callbacks=[*callbacks, rates], **settings)
    return rates.seen, weights(module)


def assert_same(found: tuple[list[Any], dict[str, Any]], expected: tuple[list[Any], dict[str, Any]]) -> None:
    assert found[0] == expected[0]
    assert_equal(found[1], expected[1])


SHIPPED = [Two, OneCycle, Lists, Several, OwnPlateau, Timm]


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", SHIPPED)
@pytest.mark.parametrize("curve", ["cosine", "reduce_on_plateau"])
def test_it_is_bit_equal_to_a_module_that_ships_no_schedule(kind: type[Net], curve: str) -> None:
    options: dict[str, Any] = {"warmup": 2}
    if curve == "reduce_on_plateau":
        options |= {**NARROW, "factor": 0.5}
    alone = run_of(Two, lt.LRSchedule(curve, **options))
    assert_same(run_of(kind, lt.LRSchedule(curve, **options, replace=True)), alone)
    assert len({lr for step in alone[0] for lr, _ in step}) > 2, "the schedule does something"


class Named(PlainNet):
    """With an optimizer that adds settings to its groups when it is made, or has a learning rate in a tensor."""

    def __init__(self, name: str, ships: bool) -> None:
        super().__init__()
        self.name, self.ships = name, ships

    def configure_optimizers(self) -> Any:
        optimizer = lt.optimizer(self.name, self, 0.1)
        if not self.ships:
            return optimizer
        return [optimizer], [lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=12)]


@pytest.mark.parametrize("name", ["adamw", "lookahead_sgd", "adamw4bit"])
def test_settings_that_an_optimizer_has_added_stay(name: str) -> None:
    plain, replaced = (build(Named, name=name, ships=ships) for ships in (False, True))
    with torch.compiler.set_stance("force_eager"):
        fit(plain, callbacks=[lt.LRSchedule("cosine")])
        run = fit(replaced, callbacks=[lt.LRSchedule("cosine", replace=True)])
    assert_equal(weights(replaced), weights(plain))
    expected = plain.trainer.optimizers[0].param_groups
    for group, other in zip(run.optimizers[0].param_groups, expected, strict=True):
        assert group.keys() == other.keys()


@pytest.mark.parametrize("kind", SHIPPED[1:])
def test_without_it_the_error_says_so(kind: type[Net]) -> None:
    message = "from configure_optimizers: both set the learning rate.* pass LRSchedule\\(replace=True\\)"
    with pytest.raises(MisconfigurationException, match=message):
        run_of(kind, lt.LRSchedule("cosine"))


def test_the_checkpoint_of_the_shipped_schedule_is_refused_by_name(tmp_path: Path) -> None:
    run_of(OneCycle, ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1), enable_checkpointing=True)
    with pytest.raises(ValueError, match="state of another kind of scheduler than CurveLR"):
        run_of(OneCycle, lt.LRSchedule("cosine", replace=True), ckpt_path=tmp_path / "step=6.ckpt")


class Ready(Two):
    """Its optimizer is there before Lightning asks for it."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.ready = lr_scheduler.OneCycleLR(self.optimizer(), max_lr=1.0, total_steps=12)

    def configure_optimizers(self) -> Any:
        return [self.ready.optimizer], [self.ready]


def test_an_optimizer_that_was_made_before_is_refused_before_the_first_step() -> None:
    module = build(Ready)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"made outside of Ready\.configure_optimizers: make it there"):
        fit(module, callbacks=[lt.LRSchedule("cosine", replace=True)])
    assert_equal(weights(module), before)


def test_nothing_of_it_is_left_in_the_module_or_in_torch() -> None:
    original = torch.optim.Optimizer.add_param_group
    module = build(Timm)
    fit(module, callbacks=[lt.LRSchedule("cosine", replace=True)])
    assert torch.optim.Optimizer.add_param_group is original
    assert not {"configure_optimizers", "lr_scheduler_step"} & vars(module).keys()


def test_beside_a_trick_that_splits_the_groups() -> None:
    unfreeze = {"at": [3], "parameters": [r"^layers\.0"], "lr_factor": 0.5}
    alone = run_of(Two, lt.GradualUnfreeze(**unfreeze), lt.LRSchedule("cosine"))
    assert_same(run_of(OneCycle, lt.GradualUnfreeze(**unfreeze), lt.LRSchedule("cosine", replace=True)), alone)


class OneGroup(PlainNet):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=12)]


@pytest.mark.parametrize(
    "split",
    [
        lambda: lt.LoRA(r"layers\.0", r=2, train=r"layers\.[1-9]", lr_ratio=4.0),
        lambda: lt.GradualUnfreeze([3], parameters=[r"^layers\.0"], lr_factor=0.5),
    ],
    ids=["LoRA", "GradualUnfreeze"],
)
def test_beside_a_trick_that_splits_a_group_in_two(split: Any) -> None:
    alone = run_of(PlainNet, split(), lt.LRSchedule("cosine"))
    assert_same(run_of(OneGroup, split(), lt.LRSchedule("cosine", replace=True)), alone)
