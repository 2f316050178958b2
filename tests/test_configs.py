"""The configurations in configs/ run as their first lines say, but for two steps; overlays run over every task."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import pytest
import yaml

import lightning_tricks as lt
from lightning_tricks_cli.main import main
from tests.ranks import run_alone, run_ranks

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml")) + sorted((ROOT / "configs" / "tricks").glob("*.yaml"))
TASKS = ("digits", "textures", "glosses")
OVER = {"mixup": ("digits", "textures"), "cutmix": ("textures",), "hidden_mixup": ("glosses",)}  # all others: any task
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.log_every_n_steps=1"]

Command = list[str]


class Fit(NamedTuple):
    steps: int
    callbacks: list[str]
    strategy: set[str]  # its name in the registry, and its class
    model: list[str]  # its class and the bases: FSDP2 makes a class of its own
    rho: float | None


def trainer_of(arguments: Command, folder: Path) -> L.Trainer:
    """The trainer, after ``lightning-tricks fit`` in the folder, for two steps."""
    trainers: list[L.Trainer] = []
    original = L.Trainer.fit

    def fit(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainers.append(self)
        original(self, *args, **kwargs)

    os.chdir(folder)  # of a rank; the test itself is there
    with mock.patch.object(L.Trainer, "fit", fit):
        assert main([*arguments, *SHORT, *QUIET]) == 0
    (trainer,) = trainers
    return trainer


def fitted(arguments: Command, folder: Path) -> Fit:
    """What there was in such a fit."""
    trainer = trainer_of(arguments, folder)
    module = trainer.lightning_module
    return Fit(
        trainer.global_step,
        [type(callback).__name__ for callback in trainer.callbacks],
        {trainer.strategy.strategy_name, type(trainer.strategy).__name__},
        [each.__name__ for each in type(module).__mro__],
        module.sam.rho if isinstance(module, lt.SAMMixin) else None,
    )


def written(files: list[str]) -> dict[str, Any]:
    """What configurations say together, by plain YAML."""
    said: dict[str, Any] = {"callbacks": [], "strategy": None, "devices": 1, "model": None, "rho": None}
    for file in files:
        values = yaml.safe_load((ROOT / file).read_text())
        trainer, model = values.get("trainer", {}), values.get("model", {})
        said["callbacks"] += [
            each["class_path"] for key in ("callbacks", "callbacks+") for each in trainer.get(key, [])
        ]
        said["devices"] = trainer.get("devices", said["devices"])
        strategy = trainer.get("strategy", said["strategy"])
        said["strategy"] = strategy["class_path"].rpartition(".")[2] if isinstance(strategy, dict) else strategy
        said["model"] = model.get("class_path", said["model"])
        said["rho"] = model.get("init_args", {}).get("sam", {}).get("rho", said["rho"])
    return said


def check(arguments: Command, folder: Path) -> None:
    """Run it on all its devices: two steps, with everything that its files say."""
    said = written([value for name, value in pairwise(arguments) if name == "-c"])
    if said["devices"] == 1:
        fits = [fitted(arguments, folder)]
    else:
        fits = run_ranks(fitted, arguments, folder, nprocs=said["devices"])
    for fit in fits:
        assert fit.steps == 2
        assert set(said["callbacks"]) <= set(fit.callbacks)
        assert said["strategy"] is None or said["strategy"] in fit.strategy
        assert said["model"].rpartition(".")[2] in fit.model
        assert fit.rho == said["rho"]


def commands(text: str) -> list[Command]:
    """The command lines after the first word."""
    return [shlex.split(line) for line in re.findall(r"^(?:# )?lightning-tricks (.+)$", text, re.MULTILINE)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


QUICK = ("digits", "glosses", "digits_schedule", "ddp_bf16", "cutmix", "ema_sam")  # the first of each kind


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "config",
    [pytest.param(path, marks=[] if path.stem in QUICK else pytest.mark.slow) for path in CONFIGS],
    ids=lambda path: path.stem,
)
def test_the_commands_of_its_first_lines_run(config: Path, folder: Path) -> None:
    fit, *others = commands(config.read_text())
    assert fit[0] == "fit"
    assert str(config.relative_to(ROOT)) == fit[-1]
    check(fit, folder)
    assert [main(other) for other in others] == [0] * len(others)
    assert all((folder / other[-1]).stat().st_size for other in others)


PRODUCT = [
    (task, trick.stem, processes)
    for task in TASKS
    for trick in CONFIGS
    if trick.parent.name == "tricks" and task in OVER.get(trick.stem, TASKS)
    for processes in (1, 2)
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "trick", "processes"), PRODUCT)
def test_a_trick_lies_over_its_tasks(task: str, trick: str, processes: int, folder: Path) -> None:
    ddp = ["-c", "configs/ddp_bf16.yaml"] if processes == 2 else []
    check(["fit", "-c", f"configs/{task}.yaml", *ddp, "-c", f"configs/tricks/{trick}.yaml"], folder)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["textures", "glosses"])
def test_a_task_runs_on_two_devices(task: str, folder: Path) -> None:
    check(["fit", "-c", f"configs/{task}.yaml", "-c", "configs/ddp_bf16.yaml"], folder)


def test_overlays_add_to_each_other(folder: Path) -> None:
    tricks = [f"configs/tricks/{name}.yaml" for name in ("mixup", "ema_sam", "guards", "flat_cos")]
    files = ["configs/digits.yaml", *tricks]
    check(["fit", *(word for file in files for word in ("-c", file))], folder)
    assert written(files)["callbacks"] == ["Mixup", "EMA", "AutoClip", "SkipNonFinite", "LRSchedule"]


@pytest.mark.slow
def test_the_readme_names_every_file_and_its_commands_and_script_run(folder: Path) -> None:
    readme = (ROOT / "configs" / "README.md").read_text()
    assert all(path.name in readme for path in CONFIGS if path.parent.name == "configs")
    for command in commands(readme):
        check(command, folder)
    (script,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (folder / "fit.py").write_text(script)
    arguments = ["fit", "-c", "configs/digits.yaml", "-c", "configs/tricks/ema.yaml", *SHORT, *QUIET]
    subprocess.run([sys.executable, "fit.py", *arguments], cwd=folder, check=True)


def test_the_command_itself_runs_one(folder: Path) -> None:
    arguments = ["fit", "-c", "configs/digits.yaml", "-c", "configs/tricks/ema_sam.yaml", *SHORT, *QUIET]
    assert run_alone(command_itself, arguments, folder) == 0
    (checkpoint,) = folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    assert checkpoint.stat().st_size


def command_itself(arguments: Command, folder: Path) -> object:
    """The exit status of ``python -m lightning_tricks_cli.main`` in the folder."""
    os.chdir(folder)
    sys.argv[1:] = arguments
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("lightning_tricks_cli.main", run_name="__main__", alter_sys=True)
    return stop.value.code


def test_the_schedule_of_the_digits_is_as_written(folder: Path) -> None:
    trainer = trainer_of(["fit", "-c", "configs/digits_schedule.yaml"], folder)
    (schedule,) = (callback for callback in trainer.callbacks if isinstance(callback, lt.LRSchedule))
    assert (schedule.curve, schedule.settings) == ("wsd", {"warmup": 0.05, "floor": 0.0})
