"""The benchmark of the savers runs, and the figures in the repository are those that it makes now."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_ema import cells

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "speed.json").read_text())


def test_the_figures_have_every_cell(committed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = runpy.run_path(str(BENCHMARKS / "speed.py"))
    assert committed["trainers"].keys() == script["TRAINERS"].keys()
    assert committed["checkpointing"].keys() == set(script["CHECKPOINTED"])
    for rows in committed["checkpointing"].values():
        assert rows["full"]["kept_MiB"] < rows["selective"]["kept_MiB"] < rows["plain"]["kept_MiB"]
    assert len(committed["channels_last"]) == 2 * len(script["CONVOLUTIONS"])
    assert committed["idle"].keys() == {"plain", "ActivationCheckpointing", "ChannelsLast", "torch.compile", "Compile"}


@pytest.mark.slow
def test_the_script_makes_these_figures(committed: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("timm")
    output = tmp_path / "speed.json"
    command = [sys.executable, str(BENCHMARKS / "speed.py"), "--quick", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert cells(json.loads(output.read_text())) == cells(committed)
