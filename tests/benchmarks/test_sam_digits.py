"""The experiment with SAM and wrong labels runs, and the figures in the repository are those that it makes now."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
ROW = {"mean", "std", "mean_seconds", "accuracies", "seconds"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "sam_digits.py"))


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "sam_digits.json").read_text())


def test_the_figures_have_every_cell(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for labels, (_, names) in script["SETTINGS"].items():
        assert list(committed[labels]) == names
        assert all(row.keys() == ROW for row in committed[labels].values())
    assert {"torch", "lightning", "scikit-learn", "lightning-tricks"} < committed["machine"].keys()
    settings = committed["settings"]
    assert settings["seeds"] == list(range(script["SEEDS"]))
    named = ("epochs", "noise", "batch", "lr", "momentum", "weight_decay")
    assert all(settings[name] == script[name.upper()] for name in named)


def test_the_means_and_the_targets_are_those_of_the_runs(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for labels in script["SETTINGS"]:
        for row in committed[labels].values():
            runs = row["accuracies"]
            assert len(runs) == len(row["seconds"]) == script["SEEDS"]
            assert (row["mean"], row["std"]) == (round(fmean(runs), 4), round(stdev(runs), 4))
    assert committed["targets"] == script["targets"](committed)


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
