"""README: its figures are those of the committed runs, its code runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import statistics
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_tricks as lt
from lightning_tricks.examples.digits import SharpDigits
from lightning_tricks_cli.catalogue import CATALOGUE, Row
from lightning_tricks_cli.main import parser
from tests.ranks import run_alone

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
TRICKS = (
    *("flat_cos", "one_cycle", "EMA", "SWA", "SAM", "Mixup", "CutMix", "HiddenMixup", "AutoClip"),
    *("HardExampleFilter, prune", "HardExampleFilter, loss", "SAM + EMA + flat_cos"),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def figure(folder: str, variant: str, key: str = "test_accuracy") -> str:
    """Mean and (population) standard deviation over the seeds, as the demo prints them."""
    runs = json.loads((RESULTS / folder / "results.json").read_text())["runs"][variant]
    values = [run[key] for run in runs]
    assert len(values) == 5
    return f"{statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}"


def test_the_tables_are_those_of_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert importlib.import_module("readme").renewed(README) == README, "run make tables"


def test_the_null_result_is_the_committed_one() -> None:
    text = " ".join(README.split())
    for variant in ("plain", "SAM", "SAM + EMA + flat_cos"):
        assert figure("digits_clean", variant) in text


def test_the_best_epochs_are_the_committed_ones() -> None:
    runs = json.loads((RESULTS / "digits" / "results.json").read_text())["runs"]
    plain, ema, tricks = (
        [statistics.fmean(epoch) for epoch in zip(*(run["val_accuracy"] for run in runs[variant]), strict=True)]
        for variant in ("plain", "EMA", "SAM + EMA + flat_cos")
    )
    text = " ".join(README.split())
    for curve in (plain, ema):
        assert f"{max(curve):.3f} at epoch {curve.index(max(curve)) + 1}" in text
    assert f"{tricks[-1]:.3f} at the end" in text


def test_the_radius_is_the_best_on_validation_and_the_default_is_reported() -> None:
    rows = json.loads((RESULTS / "digits_rho.json").read_text())["rows"]
    of_all = [row for row in rows if row["variant"] == "SAM + EMA + flat_cos"]
    assert max(of_all, key=lambda row: row["val_accuracy"])["rho"] == SharpDigits.sam.rho
    (default,) = [row["test_accuracy"] for row in of_all if row["rho"] == lt.SAM().rho]
    assert f"have {default:.3f})" in " ".join(README.split())


def test_what_is_said_of_all_tasks_is_so() -> None:
    rows = json.loads((RESULTS / "quality.json").read_text())["rows"]
    told = {(row["setting"], row["trick"]): row["over_plain"] for row in rows}
    clean = [each for (setting, trick), each in told.items() if "clean" in setting and trick in TRICKS]
    assert len(clean) >= 3 * 10
    assert all(each["low"] <= 0 for each in clean)  # no trick is told from plain training, unless it is worse
    wrong = {setting for setting, _ in told if "noisy" in setting}
    assert all(told[setting, trick]["high"] < 0 for setting in wrong for trick in TRICKS if "HardExample" in trick)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_code_runs(code: str, tmp_path: Path) -> None:
    run_alone(run_code, code, tmp_path)


def run_code(code: str, folder: Path) -> None:
    """The code as a script, in a folder of its own."""
    os.chdir(folder)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_the_yaml_configures_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "config.yaml").write_text(text + "  accelerator: cpu\n  logger: false\nmodel: tests.nets.Net\n")
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(tmp_path / "config.yaml")])
    trainer = LightningCLI(save_config_callback=None, seed_everything_default=0, run=False).trainer
    assert trainer.precision == "bf16-mixed"
    assert trainer.strategy.strategy_name == "ddp_bf16"
    assert {lt.EMA, lt.LRSchedule} <= {type(callback) for callback in trainer.callbacks}


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: row.names[0])
def test_the_line_of_a_trick_is_right(row: Row) -> None:
    """A callback can be made, a command is parsed, the rest compiles."""
    match row.line.split():
        case ["lightning-tricks", *arguments]:
            parser().parse_args(arguments)
        case ["return", *_]:
            compile(f"def configure_optimizers(self, optimizer):\n    {row.line}", row.line, "exec")
        case _ if row.line.startswith("callbacks="):
            eval(f"dict({row.line})", {"lt": lt})
        case _:
            compile(row.line, row.line, "exec")
    assert set(re.findall(r"\blt\.(\w+)", row.line)) <= {*row.names, *row.beside}


def test_it_is_short() -> None:
    assert len(README.split()) <= 1200
