"""The configurations in configs/ run as they are, but for two steps."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

import lightning_tricks as lt
from tests.ranks import run_ranks

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
QUIET = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def started(config: Path, folder: Path) -> int:
    """Run it by LightningCLI for two steps; how many there were."""
    options = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", f"--trainer.default_root_dir={folder}"]
    sys.argv = ["fit.py", "--config", str(config), *QUIET, *options]
    cli = LightningCLI(run=False, save_config_callback=None)
    cli.trainer.fit(cli.model, cli.datamodule)
    return cli.trainer.global_step


def started_by_its_script(config: Path, folder: Path) -> int:
    """Run it by the lines in its header; how many there were."""
    lines = re.findall(r"^#     (.*)$", config.read_text(), re.MULTILINE)
    sys.argv = [
        "fit.py",
        "fit",
        "-c",
        str(config),
        *QUIET,
        "--trainer.fast_dev_run=2",
        f"--trainer.default_root_dir={folder}",
    ]
    exec("\n".join(lines), {})
    return len(lines)


def on_each_device(function: Callable[[Path, Path], int], config: Path, folder: Path) -> list[int]:
    devices = yaml.safe_load(config.read_text())["trainer"]["devices"]
    return [function(config, folder)] if devices == 1 else run_ranks(function, config, folder, nprocs=devices)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_it_runs(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fit.py"])
    assert set(on_each_device(started, config, tmp_path)) == {2}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_script_of_its_header_runs_it(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fit.py"])
    assert set(on_each_device(started_by_its_script, config, tmp_path)) == {3}


def test_the_schedule_of_the_digits_is_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = (path for path in CONFIGS if path.stem == "digits_schedule")
    monkeypatch.setattr("sys.argv", ["fit.py", "-c", str(config), *QUIET])
    trainer = LightningCLI(run=False, save_config_callback=None).trainer
    (schedule,) = (callback for callback in trainer.callbacks if isinstance(callback, lt.LRSchedule))
    assert (schedule.curve, schedule.settings) == ("wsd", {"warmup": 0.05, "floor": 0.0})
    assert any(isinstance(callback, lt.EMA) for callback in trainer.callbacks)
