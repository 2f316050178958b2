"""The demo: what it prints and writes, that its checkpoint is free of this package, and what it shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_tricks.examples.digits import VARIANTS, load_digits, run
from lightning_tricks_cli.runs.demo import demo
from tests.ranks import run_alone

PLAIN_TORCH = """
import sys, torch
from torch import nn
state = torch.load(checkpoint, weights_only=True)["state_dict"]
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
net.load_state_dict({name.removeprefix("network."): weight for name, weight in state.items()})
images, labels = torch.load(test)
accuracy = (net(images).argmax(-1) == labels).float().mean().item()
assert "lightning_tricks" not in sys.modules and "lightning" not in sys.modules
"""


def scored(checkpoint: str, test: str) -> float:
    """The accuracy, where no module of ours or Lightning's is loaded."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("lightning_tricks", "lightning")]:
        del sys.modules[name]
    names: dict[str, Any] = {"checkpoint": checkpoint, "test": test}
    exec(PLAIN_TORCH, names)
    return names["accuracy"]


def mean(runs: list[dict[str, float]]) -> float:
    return sum(run["test_accuracy"] for run in runs) / len(runs)


def test_it_prints_a_table_and_writes_picture_results_and_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = demo(tmp_path, seeds=2, epochs=2)
    printed = capsys.readouterr().out
    assert all(name in printed for name in VARIANTS)
    gain = 100 * (mean(results["EMA"]) - mean(results["plain"]))
    assert f"{gain:+.1f} points" in printed
    assert "100%" in printed  # the progress bar
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == results
    assert [run["seed"] for run in results["plain"]] == [0, 1]


def test_the_checkpoint_loads_in_plain_torch_and_scores_what_the_table_says(tmp_path: Path) -> None:
    import torch

    results = demo(tmp_path, seeds=1, epochs=3)
    torch.save(load_digits(0.4)["test"], tmp_path / "test.pt")
    accuracy = run_alone(scored, *(str(tmp_path / name) for name in ("digits.ckpt", "test.pt")))
    assert accuracy == pytest.approx(results["SAM + EMA + flat_cos"][-1]["test_accuracy"], abs=1e-6)


def test_the_data_is_real_split_once_and_noisy_only_in_training() -> None:
    clean, noisy = load_digits(0.0), load_digits(0.4)
    assert [len(noisy[part][1]) for part in ("train", "val", "test")] == [900, 300, 597]
    assert 0.36 < (clean["train"][1] != noisy["train"][1]).float().mean() < 0.44
    for part in ("val", "test"):
        assert (clean[part][1] == noisy[part][1]).all()


def test_averaging_does_not_touch_the_raw_curve() -> None:
    plain, averaged = (run(tricks, 0, epochs=3, noise=0.4) for tricks in ((), ("EMA",)))
    assert averaged["val_accuracy_raw"] == plain["val_accuracy"]
    assert averaged["val_accuracy"] != plain["val_accuracy"]


@pytest.mark.slow
def test_in_the_whole_demo_one_trick_gains_and_three_gain_no_more(tmp_path: Path) -> None:
    results = demo(tmp_path)
    assert len(results["plain"]) == 5
    assert mean(results["EMA"]) > mean(results["plain"]) + 0.01
    assert mean(results["SAM + EMA + flat_cos"]) < mean(results["EMA"]) + 0.005
