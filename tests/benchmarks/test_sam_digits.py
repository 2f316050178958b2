"""The experiment with SAM and wrong labels runs, and the figures in the repository are those that it makes now."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
ROW = {"rho", "val_mean", "test_mean", "test_std", "mean_seconds", "grid"}
CELL = ROW - {"grid"} | {"val", "test", "seconds"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "sam_digits.py"))


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "sam_digits.json").read_text())


def test_the_figures_have_every_cell(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for labels, variants in script["SETTINGS"].items():
        assert list(committed[labels]) == list(variants)
        for name, variant in variants.items():
            row = committed[labels][name]
            assert row.keys() == ROW
            assert [cell["rho"] for cell in row["grid"]] == list(variant.radii or (None,))
            assert all(cell.keys() == CELL for cell in row["grid"])
    assert {"torch", "lightning", "scikit-learn", "lightning-tricks"} < committed["machine"].keys()
    settings = committed["settings"]
    assert settings["seeds"] == list(range(script["SEEDS"]))
    assert settings["images"] == {"train": 900, "val": 300, "test": 597}
    named = ("epochs", "noise", "batch", "lr", "momentum", "weight_decay")
    assert all(settings[name] == script[name.upper()] for name in named)


def test_the_means_are_those_of_the_runs(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for cell in (cell for labels in script["SETTINGS"] for row in committed[labels].values() for cell in row["grid"]):
        val, test, seconds = cell["val"], cell["test"], cell["seconds"]
        assert len(val) == len(test) == len(seconds) == script["SEEDS"]
        assert cell["val_mean"] == round(fmean(val), 4)
        assert (cell["test_mean"], cell["test_std"]) == (round(fmean(test), 4), round(pstdev(test), 4))


def test_the_radius_is_the_one_that_validates_best(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for labels in script["SETTINGS"]:
        for row in committed[labels].values():
            validated = [cell["val_mean"] for cell in row["grid"]]
            best = row["grid"][validated.index(max(validated))]
            assert {key: row[key] for key in ROW - {"grid"}} == {key: best[key] for key in ROW - {"grid"}}


def test_the_choice_does_not_look_at_the_test(script: dict[str, Any]) -> None:
    runs = {0.1: (0.8, 0.9), 0.2: (0.9, 0.5), 0.3: (0.9, 0.8)}

    def made(val: float, test: float) -> dict[str, Any]:
        return {"metrics": {"val_accuracy": val, "test_accuracy": test}, "seconds": 1.0}

    grid = [script["cell"](rho, [made(val, test)]) for rho, (val, test) in runs.items()]
    row = script["chosen"](grid)
    assert (row["rho"], row["test_mean"]) == (0.2, 0.5)


def test_radii_stand_side_by_side(script: dict[str, Any], committed: dict[str, Any]) -> None:
    shown, rows = committed[script["BY_RHO"]], committed["noisy labels"]
    assert list(shown) == ["0.1", "0.2", "0.3", "0.5", "0.7"]
    for title, name in {"every step": script["SAM"], "every 2 steps": script["EVERY_2"]}.items():
        validated = {str(cell["rho"]): cell["val_mean"] for cell in rows[name]["grid"]}
        assert {rho: row[title] for rho, row in shown.items()} == {rho: validated.get(rho) for rho in shown}


def test_the_targets_are_judged_from_the_figures(script: dict[str, Any], committed: dict[str, Any]) -> None:
    assert committed["targets"] == script["targets"](committed)
    for micro, met in {0.9: True, 0.89: False}.items():
        rows = {script["MICRO"]: {"test_mean": micro}, script["EQUAL"]: {"test_mean": 0.7}}
        assert script["targets"]({"noisy labels": rows})["SGD at equal compute +20"]["met"] is met


@pytest.mark.parametrize(("option", "file"), [([], "sam_digits.json"), (["--quick"], "scratch/sam_digits.json")])
def test_a_quick_run_does_not_touch_the_committed_figures(
    option: list[str], file: str, script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scope = script["main"].__globals__
    assert scope["OUTPUT"].parent / "scratch" / "sam_digits.json" == scope["SCRATCH"]
    monkeypatch.setitem(scope, "OUTPUT", tmp_path / "sam_digits.json")
    monkeypatch.setitem(scope, "SCRATCH", tmp_path / "scratch" / "sam_digits.json")
    monkeypatch.setitem(scope, "measure", lambda *_: {"quick": bool(option)})
    monkeypatch.setattr(sys, "argv", ["sam_digits.py", *option])
    script["main"]()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == [file]


@pytest.mark.slow
def test_the_script_makes_these_figures(committed: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    output = tmp_path / "sam_digits.json"
    command = [sys.executable, str(BENCHMARKS / "sam_digits.py"), "--quick", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    made = json.loads(output.read_text())
    assert made.keys() == committed.keys()
    assert made["settings"].keys() == committed["settings"].keys()
    assert all(name in run.stdout for name in committed["noisy labels"])
