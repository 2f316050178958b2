"""The benchmark of EMA runs, and the figures in the repository are those that it makes now. No time is asserted."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
FIGURES = {"median_us", "min_us", "max_us"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "ema.py"))


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "ema.json").read_text())


def cells(tree: Any, path: str = "") -> set[str]:
    if isinstance(tree, dict):
        return {cell for key, value in tree.items() for cell in cells(value, f"{path}/{key}")}
    return {path}


def test_the_figures_have_every_cell(script: dict[str, Any], committed: dict[str, Any]) -> None:
    updates = script["UPDATES"].keys()
    swaps = {f"{name}: swap {way}" for name in script["SWAPS"] for way in ("in", "out")}
    assert committed["sets"].keys() == script["SETS"].keys()
    for row in committed["sets"].values():
        assert row["update"].keys() == updates
        assert row["swap"].keys() == {script["COPY"], *swaps}
        assert all(
            {*FIGURES, "over_floor"} <= each.keys() for part in ("update", "swap") for each in row[part].values()
        )
        tracked = {f"{name}: {what}" for name in updates for what in ("track", "update")}
        assert row["bytes_per_parameter"].keys() == tracked | swaps
    assert committed["steps"].keys() == set(script["TRAINED"]["cpu"])
    for row in committed["steps"].values():
        assert row.keys() == {script["EMPTY"], script["OURS"], script["LIGHTNING"]}
    assert {"torch", "lightning", "timm", "ema-pytorch"} < committed["machine"].keys()


def test_the_targets_are_judged_by_the_figures(script: dict[str, Any], committed: dict[str, Any]) -> None:
    assert committed["targets"] == script["targets"](committed)


def test_what_is_missing_is_named(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script["prepare"].__globals__, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["ema.py"])
    with pytest.raises(SystemExit, match="pip install timm ema-pytorch"):
        script["main"]()


@pytest.mark.slow
def test_the_script_makes_these_figures(committed: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("ema_pytorch", reason="a peer, installed for the benchmark only")
    output = tmp_path / "ema.json"
    command = [sys.executable, str(BENCHMARKS / "ema.py"), "--quick", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert cells(json.loads(output.read_text())) == cells(committed)
    assert all(name in run.stdout for name in committed["targets"])
