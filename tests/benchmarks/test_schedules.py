"""The benchmark of schedules runs, and its committed figures are those that it makes now. No time is asserted."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "schedules.py"))


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "schedules.json").read_text())


def cells(tree: Any, path: str = "") -> set[str]:
    if isinstance(tree, dict):
        return {cell for key, value in tree.items() for cell in cells(value, f"{path}/{key}")}
    return {path}


def test_the_figures_have_every_cell(script: dict[str, Any], committed: dict[str, Any]) -> None:
    assert committed["schedulers"].keys() == script["SCHEDULERS"].keys()
    for row in committed["schedulers"].values():
        assert row.keys() == {"step_us", "further_group_us", "over_torch_cosine"}
    assert {"torch", "lightning"} < committed["machine"].keys()
    assert committed["settings"]["groups"] == list(script["GROUPS"])


def test_the_targets_are_judged_by_the_figures(script: dict[str, Any], committed: dict[str, Any]) -> None:
    assert committed["targets"] == script["targets"](committed["schedulers"])


def test_a_turn_takes_its_steps_in_every_group(script: dict[str, Any]) -> None:
    for kind in script["SCHEDULERS"].values():
        made = []
        work = script["steps_of"](lambda optimizer, kind=kind, made=made: made.append(kind(optimizer)) or made[0], 3)
        work()
        assert made[0].last_epoch == script["STEPS"]
        assert len(made[0].optimizer.param_groups) == 3


@pytest.mark.slow
def test_the_script_makes_these_figures(committed: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "schedules.json"
    command = [sys.executable, str(BENCHMARKS / "schedules.py"), "--quick", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}  # this checkout, whatever is installed
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert cells(json.loads(output.read_text())) == cells(committed)
    assert all(name in run.stdout for name in committed["targets"])
