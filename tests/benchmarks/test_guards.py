"""The benchmark of guards runs, and its committed figures are those that it makes now. No time is asserted."""

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
    return runpy.run_path(str(BENCHMARKS / "guards.py"))


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "guards.json").read_text())


def cells(tree: Any, path: str = "") -> set[str]:
    if isinstance(tree, dict):
        return {cell for key, value in tree.items() for cell in cells(value, f"{path}/{key}")}
    return {path}


def test_the_figures_have_every_contender(script: dict[str, Any], committed: dict[str, Any]) -> None:
    assert committed["networks"].keys() == script["NETWORKS"].keys()
    for network in committed["networks"].values():
        assert {*network["steps"], *network["by_unit"]} == {script["FLOOR"], script["AGC"], *script["OURS"]}
        assert network["snapshots"].keys() == {script["FLOOR"], "take", "restore"}
    assert {"torch", "lightning", "timm"} < committed["machine"].keys()
    assert {"threads", "seed", "rounds"} < committed["settings"].keys()


def test_the_targets_are_judged_by_the_figures_and_met(script: dict[str, Any], committed: dict[str, Any]) -> None:
    assert committed["targets"] == script["targets"](committed["networks"])
    assert all(target["met"] for target in committed["targets"].values())


def test_a_step_calls_the_hooks_of_a_step(script: dict[str, Any]) -> None:
    class Notes:
        def __init__(self) -> None:
            self.called: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *_: self.called.append(name)

    notes, trainer = Notes(), type("Fake", (), {"optimizers": [None]})
    script["step_of"](notes, trainer, None, None)
    hooks = ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end"]
    assert notes.called == hooks


@pytest.mark.slow
def test_the_script_makes_these_figures(committed: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "guards.json"
    command = [sys.executable, str(BENCHMARKS / "guards.py"), "--quick", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}  # this checkout, whatever is installed
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert cells(json.loads(output.read_text())) == cells(committed)
    assert all(name in run.stdout for name in committed["targets"])
