"""Presets: the string, ``preset()`` and YAML are the same, and mistakes are named."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

import lightning_tricks as lt
from lightning_tricks.strategies.presets import register
from tests.few import few
from tests.nets import assert_equal, build, fit, loader, trainer
from tests.ranks import run_ranks
from tests.strategies.spy import Spy, facts

PRECISIONS = {row["name"]: row["precision"] for row in lt.presets()}
NAMES = list(PRECISIONS)
QUIET = """
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""


def fit_from_yaml(config: str) -> dict[str, Any]:
    cli = LightningCLI(Spy, args=["--config", config], run=False, save_config_callback=None)
    module = build(Spy)
    L.seed_everything(7, verbose=False)  # as ``fit`` does; a DistributedSampler takes its seed from here
    cli.trainer.fit(module, loader(), loader(24))
    return facts(cli.trainer, module)


def fit_each_way(name: str, devices: int, config: str) -> dict[str, dict[str, Any]]:
    results = {}
    for way, settings in (("string", {"strategy": name}), ("preset", lt.preset(name))):
        module = build(Spy)
        results[way] = facts(fit(module, devices=devices, max_epochs=1, **settings), module)
    return {**results, "yaml": fit_from_yaml(config)}


@pytest.mark.parametrize(("name", "devices"), few([("single_bf16", 1), ("ddp_bf16", 2)], 1))
def test_the_string_preset_and_yaml_train_the_same(name: str, devices: int, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"trainer:{QUIET}  strategy: {name}\n  devices: {devices}\n")
    for ways in run_ranks(fit_each_way, name, devices, str(config), nprocs=devices):
        expected = ways["string"]
        for way in ("preset", "yaml"):
            assert_equal(ways[way].pop("weights"), expected["weights"])
            assert ways[way] == {key: value for key, value in expected.items() if key != "weights"}, way


@pytest.mark.few(4)
@pytest.mark.parametrize("row", lt.presets(), ids=NAMES)
def test_a_class_path_with_the_presets_arguments_is_the_preset(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fit.py"])
    strategy = {"class_path": f"lightning_tricks.{row['strategy']}", "init_args": row["arguments"]}
    config = tmp_path / "config.yaml"
    config.write_text(f"seed_everything: 0\ntrainer:{QUIET}  devices: 1\n  strategy: {json.dumps(strategy)}\n")
    by_class = LightningCLI(Spy, args=["--config", str(config)], run=False, save_config_callback=None).trainer
    by_name = trainer(strategy=row["name"])
    assert by_class.precision == by_name.precision
    assert settings_of(by_class.strategy) == settings_of(by_name.strategy)


def settings_of(strategy: Any) -> dict[str, Any]:
    """What a strategy was made with, as far as it can be compared."""
    plain = (str, int, float, bool, dict, list, type(None))
    settings = {key: value for key, value in vars(strategy).items() if isinstance(value, plain)}
    if isinstance(strategy, DDPStrategy):  # a configuration file spells out torch's defaults
        of_torch = inspect.signature(DistributedDataParallel).parameters
        settings["_ddp_kwargs"] = {**{key: each.default for key, each in of_torch.items()}, **strategy._ddp_kwargs}
    return {"class": type(strategy), **settings, "strategy_name": None}


@pytest.mark.parametrize("name", NAMES)
def test_upper_case_works_as_for_lightnings_own_strategies(name: str) -> None:
    run = trainer(strategy=name.upper())
    assert run.strategy.strategy_name == name
    assert run.precision == PRECISIONS[name]


def test_each_call_gives_a_new_strategy() -> None:
    assert lt.preset("ddp_bf16")["strategy"] is not lt.preset("ddp_bf16")["strategy"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp_bf61", r"preset name must be one of .*, got 'ddp_bf61'. Did you mean 'ddp_bf16'\?"),
        ("SINGLE_BF16", r"Did you mean 'single_bf16'\?"),
        ("zzz", "preset name must be one of 'single_bf16', 'single_fp16', .*, 'zero3_nvme_bf16', got 'zzz'.$"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lt.preset(name)


@pytest.mark.parametrize(
    ("name", "unknown", "allowed"),
    [("ddp_bf16", "find_unused", "find_unused_parameters"), ("single_bf16", "static_graph", "checkpoint_io")],
)
def test_an_unknown_override_is_refused_with_what_is_allowed(name: str, unknown: str, allowed: str) -> None:
    with pytest.raises(TypeError, match=rf"preset '{name}' has no argument {unknown}; it takes .*{allowed}"):
        lt.preset(name, **{unknown: True})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("argument", ["precision_plugin", "module", "self", "args", "kwargs"])
def test_what_the_preset_or_the_trainer_sets_is_no_override(name: str, argument: str) -> None:
    with pytest.raises(TypeError, match=f"has no argument {argument}"):
        lt.preset(name, **{argument: None})


def test_the_table_lists_all_registered_names_in_full() -> None:
    ours = {
        name
        for name in StrategyRegistry.available_strategies()
        if getattr(StrategyRegistry[name]["strategy"], "__module__", "").startswith("lightning_tricks")
    }
    assert ours == set(NAMES)
    assert len(NAMES) == len(set(NAMES))
    for row in lt.presets():
        assert row.keys() == {"name", "strategy", "arguments", "precision", "when"}
        assert all(isinstance(row[key], str) and row[key] for key in row.keys() - {"arguments"}), row
        assert type(lt.preset(row["name"])["strategy"]).__name__ == row["strategy"]
        assert trainer(strategy=row["name"]).precision == row["precision"]
        assert StrategyRegistry[row["name"]]["description"] == row["when"]


def test_the_strategies_know_their_own_name() -> None:
    for name in NAMES:
        assert lt.preset(name)["strategy"].strategy_name == name


def test_registering_twice_changes_nothing() -> None:
    before = {name: dict(StrategyRegistry[name]) for name in NAMES}
    register()
    assert {name: dict(StrategyRegistry[name]) for name in NAMES} == before


def test_a_name_that_is_somebody_elses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(StrategyRegistry["ddp_bf16"], "strategy", SingleDeviceStrategy)
    with pytest.raises(RuntimeError, match=r"'ddp_bf16' is already registered by .*SingleDeviceStrategy"):
        register()
    assert StrategyRegistry["ddp_bf16"]["strategy"] is SingleDeviceStrategy


def test_a_known_override_replaces_the_presets_argument() -> None:
    strategy = lt.preset("ddp_bf16", gradient_as_bucket_view=False, process_group_backend="gloo")["strategy"]
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is False
    assert strategy.process_group_backend == "gloo"
    assert lt.preset("ddp_bf16")["strategy"]._ddp_kwargs["gradient_as_bucket_view"] is True
