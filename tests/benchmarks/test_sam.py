"""The benchmark of SAM runs, and the figures in the repository are those that it makes now. No time is asserted."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.test_ema import BENCHMARKS, FIGURES, cells


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "sam.py"))


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "sam.json").read_text())


def test_the_figures_have_every_cell(script: dict[str, Any], committed: dict[str, Any]) -> None:
    contenders = script["CONTENDERS"].keys()
    assert tuple(committed["sets"]) == script["NAMES"]
    for row in committed["sets"].values():
        assert row["perturb_and_restore"].keys() == row["copies_of_the_weights"].keys() == contenders
        assert all({*FIGURES, "over_floor"} == each.keys() for each in row["perturb_and_restore"].values())
    assert committed["steps"].keys() == script["STEPS"].keys()
    for row in committed["steps"].values():
        assert row.keys() == script["MODULES"].keys()
        assert all({*FIGURES, "over_plain", "added_median_us", "peak_copies"} == each.keys() for each in row.values())
    assert {"torch", "lightning", "timm", "pytorch-optimizer"} < committed["machine"].keys()


def test_the_targets_are_judged_by_the_figures(script: dict[str, Any], committed: dict[str, Any]) -> None:
    assert committed["targets"] == script["targets"](committed)


def weights_with_gradients() -> list[torch.Tensor]:
    weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.randn(3)
    return weights


@pytest.mark.parametrize("name", ["floor", "ours", "davda54", "pytorch_optimizer"])
def test_a_contender_restores_the_weights(script: dict[str, Any], name: str) -> None:
    if name == "pytorch_optimizer":
        pytest.importorskip("pytorch_optimizer", reason="a peer, installed for the benchmark only")
    weights = weights_with_gradients()
    before = [weight.detach().clone() for weight in weights]
    script[name](weights)()
    assert all(torch.equal(old, weight) for old, weight in zip(before, weights, strict=True))


def test_the_peer_written_here_moves_the_weights_by_the_radius(script: dict[str, Any]) -> None:
    weights = weights_with_gradients()
    before = [weight.detach().clone() for weight in weights]
    script["Davda54"](weights, rho=0.5).first_step()
    moves = torch.cat([weight.detach() - old for weight, old in zip(weights, before, strict=True)])
    torch.testing.assert_close(moves.norm(), torch.tensor(0.5))


def test_what_is_missing_is_named(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script["prepare"].__globals__, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["sam.py"])
    with pytest.raises(SystemExit, match="pip install timm pytorch-optimizer"):
        script["main"]()


@pytest.mark.slow
def test_the_script_makes_these_figures(committed: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("pytorch_optimizer", reason="a peer, installed for the benchmark only")
    output = tmp_path / "sam.json"
    command = [sys.executable, str(BENCHMARKS / "sam.py"), "--quick", "--threads", "1", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert cells(json.loads(output.read_text())) == cells(committed)
    assert all(name in run.stdout for name in committed["targets"])
