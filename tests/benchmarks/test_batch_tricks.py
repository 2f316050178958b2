"""The benchmark of batch tricks runs, and the figures in the repository are those that it makes now.

No time is asserted.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.benchmarks.test_ema import BENCHMARKS, FIGURES, cells


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "batch_tricks.py"))


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "batch_tricks.json").read_text())


def test_the_figures_have_every_cell(script: dict[str, Any], committed: dict[str, Any]) -> None:
    contenders = {script[name] for name in ("CLONE", "UNMIXED", "OURS", "TIMM")}
    assert len(committed["batches"]) == len(script["KINDS"]) * len(script["SHAPES"])
    for row in committed["batches"].values():
        assert row.keys() == contenders
        assert all({*FIGURES, "over_timm"} == each.keys() for each in row.values())
    assert len(committed["memory"]) == len(script["KINDS"]) * 2
    for row in committed["memory"].values():
        assert row.keys() == {script["OURS"], script["TIMM"]}
    assert committed["steps"].keys() == script["CALLBACKS"].keys()
    assert committed["filter"].keys() == script["FILTERS"].keys()
    for row in (*committed["steps"].values(), *committed["filter"].values()):
        assert {*FIGURES, "over_plain", "added_median_us"} == row.keys()
    assert {"torch", "lightning", "timm"} < committed["machine"].keys()


def test_the_targets_are_judged_by_the_figures(script: dict[str, Any], committed: dict[str, Any]) -> None:
    assert committed["targets"] == script["targets"](committed)


@pytest.mark.parametrize("kind", ["Mixup", "Mixup(per_sample)", "CutMix"])
def test_ours_does_the_work_that_timm_does(script: dict[str, Any], kind: str) -> None:
    callback = script["KINDS"][kind][0]()
    x, y, logits = script["drawn"]((6, 3, 8, 8), 5, "cpu")
    before = x.clone()
    mixed, target = script["our_mixed"](callback)(x, y)
    assert torch.equal(x, before)
    assert not torch.equal(mixed, x)
    lam, index = torch.as_tensor(callback.drawn.lam).reshape(-1, 1), callback.drawn.index
    lam = lam if kind != "CutMix" or lam >= 0.5 else 1 - lam  # else the target's first label is the partner's
    first, second = (y, y[index]) if torch.equal(target.branches[0], y) else (y[index], y)
    dense = lam * F.one_hot(first, 5) + (1 - lam) * F.one_hot(second, 5)
    torch.testing.assert_close(F.cross_entropy(logits, target), F.cross_entropy(logits, dense.float()))


@pytest.mark.parametrize("kind", ["Mixup", "Mixup(per_sample)", "CutMix"])
def test_timm_mixes_in_place(script: dict[str, Any], kind: str) -> None:
    pytest.importorskip("timm")
    x, y, _ = script["drawn"]((6, 3, 8, 8), 5, "cpu")
    mixed, dense = script["timm_mixed"](5, **script["KINDS"][kind][1])(x, y)
    assert mixed is x
    torch.testing.assert_close(dense.sum(1), torch.ones(6))


def test_what_is_missing_is_named(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script["prepare"].__globals__, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["batch_tricks.py"])
    with pytest.raises(SystemExit, match="pip install timm"):
        script["main"]()


@pytest.mark.slow
def test_the_script_makes_these_figures(committed: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("timm")
    output = tmp_path / "batch_tricks.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "batch_tricks.py"),
        "--quick",
        "--threads",
        "1",
        "--output",
        str(output),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert cells(json.loads(output.read_text())) == cells(committed)
    assert all(name in run.stdout for name in committed["targets"])
