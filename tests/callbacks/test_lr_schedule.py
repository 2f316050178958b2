"""LRSchedule equals the factory of the same name, in Python and from YAML."""

from __future__ import annotations

import sys
from inspect import isfunction
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks
from lightning_tricks import LRSchedule, schedules
from lightning_tricks.callbacks import lr_schedule
from tests.nets import Net, assert_equal, build, fit, loader, trainer, weights
from tests.ranks import run_ranks
from tests.schedules.recording import SaveEveryStep, Tiny, ones

CURVES = {
    "constant": {"warmup": 3},
    "cosine": {"warmup": 0.2, "floor": 0.1},
    "cosine_restarts": {"cycles": 2, "growth": 2.0},
    "flat_cos": {"warmup": 2, "flat": 0.5},
    "inverse_sqrt": {"warmup": 0.25, "floor": 0.5},
    "linear": {"total_steps": 20},
    "one_cycle": {"start": 0.1, "momentum": [0.8, 0.9]},
    "polynomial": {"power": 2},
    "step_decay": {"milestones": [4, 0.75], "gamma": 0.5},
    "wsd": {"warmup": 1, "cooldown": 0.5, "shape": "cosine"},
}


class WithFactory(Net):
    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        self.factory, self.settings = getattr(schedules, name), settings

    def configure_optimizers(self) -> Any:
        return self.factory(super().configure_optimizers(), self, **self.settings)


def test_every_factory_is_a_curve_of_the_callback():
    curves = {name for name, value in vars(schedules.curves).items() if isfunction(value) and name[0] != "_"}
    assert set(CURVES) == set(lr_schedule._CURVES) == curves - {"one_cycle_momentum", "swa_tail"}


@pytest.mark.parametrize("settings", ["default", "given"])
@pytest.mark.parametrize("name", CURVES)
def test_it_trains_bit_equal_to_the_factory_of_its_name(name, settings):
    given = CURVES[name] if settings == "given" else {}
    with_factory, with_callback = build(WithFactory, name=name, **given), build()
    fit(with_factory)
    run = fit(with_callback, callbacks=[LRSchedule(name, **given)])
    assert_equal(weights(with_factory), weights(with_callback))
    (config,) = run.lr_scheduler_configs
    assert (config.interval, config.frequency) == ("step", 1)
    assert config.scheduler.last_epoch == run.global_step == 12


def lrs(callbacks: list[Any], *args: Any, epochs: int = 2, **kwargs: Any) -> list[float]:
    module = Tiny()
    trainer(max_epochs=epochs, callbacks=callbacks).fit(module, ones(6), *args, **kwargs)
    return module.optimizer.lrs


def test_it_follows_the_curve_in_every_step():
    assert lrs([LRSchedule("linear")]) == [1 - t / 12 for t in range(12)]


def test_without_a_warmup_one_cycle_keeps_its_own():
    curve = lightning_tricks.schedules.curves.one_cycle
    assert lrs([LRSchedule("one_cycle")]) == [curve(t, total_steps=12) for t in range(12)]


def test_one_callback_serves_two_fits():
    callback = LRSchedule("cosine", warmup=0.25)
    assert lrs([callback], epochs=1) == lrs([callback], epochs=1)
    assert lrs([callback]) == lrs([LRSchedule("cosine", warmup=0.25)])


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
def test_a_resumed_fit_takes_the_same_learning_rates(tmp_path):
    whole = lrs([LRSchedule(), SaveEveryStep(tmp_path)])
    for step in (1, 6, 8):
        assert lrs([LRSchedule()], ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True) == whole[step:]


def test_its_checkpoint_is_that_of_the_factory(tmp_path):
    fit(build(WithFactory, name="flat_cos")).save_checkpoint(tmp_path / "factory.ckpt")
    fit(build(), callbacks=[LRSchedule()]).save_checkpoint(tmp_path / "callback.ckpt")
    ours, theirs = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("callback", "factory"))
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    assert ours["lr_schedulers"][0]["last_epoch"] == 12


def test_the_learning_rate_monitor_sees_it(tmp_path):
    monitor = LearningRateMonitor("step")
    logger = CSVLogger(tmp_path)
    module = Tiny()
    trainer(logger=logger, log_every_n_steps=1, callbacks=[LRSchedule("linear"), monitor]).fit(module, ones(4))
    assert monitor.lrs == {"lr-RecordingSGD": module.optimizer.lrs}


def _lrs_on_a_rank() -> list[float]:
    module = Tiny()
    trainer(strategy="ddp", devices=2, callbacks=[LRSchedule("linear")]).fit(module, ones(8))
    return module.optimizer.lrs


def test_it_counts_the_steps_of_two_ranks():
    assert run_ranks(_lrs_on_a_rank) == [[1 - t / 8 for t in range(8)]] * 2


def test_validation_alone_needs_no_schedule(tmp_path):
    module = Net()
    module.automatic_optimization = False
    trainer(callbacks=[LRSchedule()]).validate(module, loader(24), verbose=False)


@pytest.mark.parametrize(
    ("error", "settings", "message"),
    [
        (
            ValueError,
            {"curve": "flat_cosine"},
            r"curve must be one of .*, got 'flat_cosine'. Did you mean .flat_cos.\?",
        ),
        (ValueError, {"curve": "swa_tail"}, "curve must be one of .*, got 'swa_tail'"),
        (ValueError, {"curve": "reduce_on_plateau"}, "curve must be one of .*, got 'reduce_on_plateau'"),
        (TypeError, {"curve": "step_decay", "milestones": 5}, "milestones must be a list of ints .*, got 5"),
        (TypeError, {"curve": "step_decay", "milestones": [None]}, "milestones must be an int .*, got None"),
        (ValueError, {"curve": "wsd", "shape": "cos"}, "shape must be one of .*, got 'cos'"),
        (ValueError, {"curve": "one_cycle", "momentum": [0.9, 0.8]}, "lowest first .*: swap them"),
        (TypeError, {"curve": "one_cycle", "momentum": 0.9}, "momentum must be two numbers, .* got 0.9"),
        (ValueError, {"curve": "cosine_restarts", "cycles": 0}, "cycles must be at least 1, got 0"),
        (TypeError, {"peak": 2}, "curve 'flat_cos' has no option peak; it has flat, floor, warmup"),
        (TypeError, {"curve": "cosine", "flat": 0.5}, "curve 'cosine' has no option flat; it has floor, warmup"),
        (ValueError, {"warmup": -1}, "warmup must be .*, got -1"),
        (TypeError, {"warmup": True}, "warmup must be .*, got True"),
        (ValueError, {"flat": 1.5}, "flat must be .*, got 1.5"),
        (ValueError, {"floor": 2}, r"floor must be in \[0.0, 1.0\], got 2"),
        (ValueError, {"total_steps": 0}, "total_steps must be at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(error, settings, message):
    with pytest.raises(error, match=message):
        LRSchedule(**settings)


def test_two_schedules_are_refused_by_name():
    message = r"LRSchedule\(curve='linear'\) and CurveLR from configure_optimizers: both set the learning rate"
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(WithFactory, name="cosine"), callbacks=[LRSchedule("linear")])


def test_two_callbacks_are_refused():
    message = r"LRSchedule\(curve='linear'\) and LRSchedule\(curve='cosine'\): both.* Leave one"
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(), callbacks=[LRSchedule("linear"), LRSchedule("cosine")])


def test_manual_optimization_is_refused():
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match=r"Net.automatic_optimization is False.*tricks.cosine"):
        fit(module, callbacks=[LRSchedule("cosine")])


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


@pytest.mark.parametrize("class_path", ["lightning_tricks.LRSchedule", "LRSchedule"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", LRSchedule()),
        ("init_args: {curve: cosine, warmup: 5}", LRSchedule("cosine", warmup=5)),
        ("init_args: {warmup: 0.05, floor: 0.01, total_steps: 9}", LRSchedule(warmup=0.05, floor=0.01, total_steps=9)),
        ("init_args: {curve: flat_cos}, dict_kwargs: {flat: 0.5}", LRSchedule(flat=0.5)),
        (
            "init_args: {curve: step_decay}, dict_kwargs: {milestones: [3, 0.5], gamma: 0.5}",
            LRSchedule("step_decay", milestones=[3, 0.5], gamma=0.5),
        ),
        (
            "init_args: {curve: wsd}, dict_kwargs: {shape: linear, cooldown: 4}",
            LRSchedule("wsd", shape="linear", cooldown=4),
        ),
        (
            "init_args: {curve: one_cycle}, dict_kwargs: {momentum: [0.85, 0.95]}",
            LRSchedule("one_cycle", momentum=[0.85, 0.95]),
        ),
        (
            "init_args: {curve: cosine_restarts}, dict_kwargs: {cycles: 2, growth: 2}",
            LRSchedule("cosine_restarts", cycles=2, growth=2),
        ),
        ("init_args: {curve: polynomial}, dict_kwargs: {power: 2.0}", LRSchedule("polynomial", power=2.0)),
    ],
)
def test_it_is_built_from_yaml(cli, class_path, arguments, expected):
    tool = cli(f"{{class_path: {class_path}, {arguments}}}", run=False)
    found = callback_of(tool)
    assert (found.curve, found.total_steps, found.settings) == (expected.curve, expected.total_steps, expected.settings)


@pytest.mark.parametrize("warmup", ["1", "1.0"])
def test_yaml_tells_one_step_from_the_whole_of_training(cli, warmup):
    tool = cli(f"{{class_path: LRSchedule, init_args: {{warmup: {warmup}}}}}", run=False)
    assert repr(callback_of(tool).settings) == f"{{'warmup': {warmup}}}"


def test_it_trains_from_the_command_line(cli):
    tool = cli("{class_path: LRSchedule, init_args: {curve: linear, warmup: 4}}", "fit")
    (config,) = tool.trainer.lr_scheduler_configs
    assert config.scheduler.state_dict() == {
        "last_epoch": 12,
        "settings": {"curve": "linear", "total_steps": 12, "warmup": 4, "floor": 0.0},
    }


def test_options_train_from_the_command_line(cli):
    tool = cli(
        "{class_path: LRSchedule, init_args: {curve: step_decay}, dict_kwargs: {milestones: [3, 0.5], gamma: 0.5}}",
        "fit",
    )
    (config,) = tool.trainer.lr_scheduler_configs
    assert config.scheduler.settings["milestones"] == (3.0, 6.0)
    assert tool.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_milestones_out_of_order_are_refused_when_training_starts():
    with pytest.raises(ValueError, match=r"milestones must come in order .*, got \[0.5, 3\] \(steps 6, 3\)"):
        fit(build(), callbacks=[LRSchedule("step_decay", milestones=[0.5, 3])])


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        return schedules.reduce_on_plateau(super().configure_optimizers(), self)


def test_a_module_with_a_plateau_is_refused_by_name():
    message = r"and PlateauLR from configure_optimizers: both .*Leave one of them out"
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(Plateau), callbacks=[LRSchedule("linear")])


def test_a_schedule_added_on_resume_stands_where_training_stands(tmp_path: Any) -> None:
    fit(build(), max_epochs=2).save_checkpoint(tmp_path / "x.ckpt")
    run = fit(build(), callbacks=[LRSchedule("linear")], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 24
    assert run.optimizers[0].param_groups[0]["lr"] == 0
