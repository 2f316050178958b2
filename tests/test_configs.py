"""The configurations in configs/ run as they are, but for two steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_tricks as lt

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
QUIET = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_it_runs(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--config", str(config), *QUIET, "--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
    monkeypatch.setattr("sys.argv", ["fit.py", *arguments])
    monkeypatch.chdir(tmp_path)
    cli = LightningCLI(run=False, save_config_callback=None)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.global_step == 2


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_script_of_its_header_runs_it(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.findall(r"^#     (.*)$", config.read_text(), re.MULTILINE)
    assert len(lines) == 3
    arguments = ["fit", "-c", str(config), *QUIET, "--trainer.fast_dev_run=2"]
    monkeypatch.setattr("sys.argv", ["fit.py", *arguments])
    monkeypatch.chdir(tmp_path)
    exec("\n".join(lines), {})


def test_the_schedule_of_the_digits_is_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = (path for path in CONFIGS if path.stem == "digits_schedule")
    monkeypatch.setattr("sys.argv", ["fit.py", "-c", str(config), *QUIET])
    trainer = LightningCLI(run=False, save_config_callback=None).trainer
    (schedule,) = (callback for callback in trainer.callbacks if isinstance(callback, lt.LRSchedule))
    assert (schedule.curve, schedule.settings) == ("wsd", {"warmup": 0.05, "floor": 0.0})
    assert any(isinstance(callback, lt.EMA) for callback in trainer.callbacks)
