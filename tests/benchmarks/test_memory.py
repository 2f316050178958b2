"""The benchmark of the memory estimate: the figures in the repository have every cell and are within their limit."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_the_figures_have_every_cell_and_are_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = runpy.run_path(str(BENCHMARKS / "memory.py"))
    committed = json.loads((BENCHMARKS / "results" / "memory.json").read_text())
    cases = {f"{m}, {p}, {o}" for m in script["MODELS"] for p in script["PRECISIONS"] for o in script["OPTIMIZERS"]}
    assert committed["rows"].keys() == cases
    assert committed["met"]
    for row in committed["rows"].values():
        assert row["weights_exact"]
        assert row["gradients_exact"]
        assert row["optimizer_exact"]
