"""The experiment with batch tricks runs, and the figures in the repository are those that it makes now."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
RUN = {"val", "test", "seconds", "forward", "backward"}
JUDGED = {"val_mean", "test_mean", "test_std", "mean_seconds", "compute", "points", "seeds_better", "seeds_worse"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "batch_quality.py"))


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "batch_quality.json").read_text())


def tables(script: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result[task][labels] for task in script["TASKS"] for labels in script["LABELS"]]


def test_the_figures_have_every_cell(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for rows in tables(script, committed):
        assert list(rows) == list(script["VARIANTS"])
        assert all(row.keys() == RUN | JUDGED for row in rows.values())
    assert {"torch", "lightning", "scikit-learn", "scikit-image", "lightning-tricks"} < committed["machine"].keys()
    settings = committed["settings"]
    assert settings["seeds"] == list(range(script["SEEDS"]))
    assert settings["images"] == {
        "digits": {"train": 900, "val": 300, "test": 597},
        "textures": {"train": 192, "val": 192, "test": 384},
    }
    named = ("epochs", "noise", "batch", "lrs", "momentum", "weight_decay")
    assert all(settings[name] == script[name.upper()] for name in named)


def test_the_means_are_those_of_the_runs(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for rows in tables(script, committed):
        for row in rows.values():
            assert all(len(row[key]) == script["SEEDS"] for key in RUN)
            assert row["val_mean"] == round(fmean(row["val"]), 4)
            assert (row["test_mean"], row["test_std"]) == (round(fmean(row["test"]), 4), round(pstdev(row["test"]), 4))


def test_variants_are_compared_with_plain_training_of_the_same_seed(
    script: dict[str, Any], committed: dict[str, Any]
) -> None:
    for rows in tables(script, committed):
        runs = {
            name: [dict(zip(RUN, each, strict=True)) for each in zip(*(row[key] for key in RUN), strict=True)]
            for name, row in rows.items()
        }
        for name, row in rows.items():
            made = script["cell"](runs[name], runs[script["PLAIN"]])
            assert {key: row[key] for key in JUDGED} == {key: made[key] for key in JUDGED}


def test_the_cell_counts_seeds_and_passes(script: dict[str, Any]) -> None:
    def runs(tests: tuple[float, ...], forward: int, backward: int) -> list[dict[str, float]]:
        return [{"val": 0.5, "test": t, "seconds": 1.0, "forward": forward, "backward": backward} for t in tests]

    row = script["cell"](runs((0.7, 0.5, 0.6), forward=150, backward=50), runs((0.5, 0.6, 0.6), 100, 100))
    assert (row["points"], row["seeds_better"], row["seeds_worse"]) == (3.33, 1, 1)
    assert row["compute"] == round(250 / 300, 3)


def test_the_references_of_the_filter_have_its_computation(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for rows in tables(script, committed):
        passed = {name: row["backward"][0] for name, row in rows.items()}
        assert passed[script["HALF"]] == passed[script["RANDOM"]] == passed[script["PLAIN"]] / 2
        assert passed[script["PRUNE"]] == pytest.approx(passed[script["HALF"]], rel=0.02)
        assert rows[script["PRUNE"]]["compute"] == pytest.approx(rows[script["FIVE_SIXTHS"]]["compute"], rel=0.02)


def test_the_choice_does_not_look_at_the_test(script: dict[str, Any]) -> None:
    figures = {
        "plain": (0.8, 0.9),
        script["HALF"]: (0.9, 0.7),
        script["PRUNE"]: (0.5, 0.9),
        script["LOSS"]: (0.6, 0.75),
    }
    row = script["chosen"]({name: {"val_mean": val, "test_mean": test} for name, (val, test) in figures.items()})
    assert (row["plain"], row["trick"], row["points"]) == (script["HALF"], script["LOSS"], 5.0)


def test_the_summaries_are_those_of_the_figures(script: dict[str, Any], committed: dict[str, Any]) -> None:
    for title, judge in {"CHOSEN": "chosen", "FILTERS": "filters"}.items():
        assert committed[script[title]] == script["over_settings"](committed, script[judge])


def test_patches_of_a_photograph_are_in_one_part_only(script: dict[str, Any]) -> None:
    pytest.importorskip("skimage")
    clean, noisy = (script["textures"](noise) for noise in (0.0, 0.4))
    images = torch.cat([images for images, _ in clean.values()])
    assert images.shape == (768, 1, 32, 32)
    assert len(images.flatten(1).unique(dim=0)) == 768
    assert clean["train"][0].mean().item() == pytest.approx(0, abs=1e-4)
    assert all(labels.bincount().tolist() == [len(labels) // 3] * 3 for _, labels in clean.values())
    assert all(torch.equal(clean[part][1], noisy[part][1]) for part in ("val", "test"))
    assert 0.3 < (clean["train"][1] != noisy["train"][1]).float().mean() < 0.5


@pytest.mark.slow
def test_the_script_makes_these_figures(script: dict[str, Any], committed: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("skimage")
    output = tmp_path / "batch_quality.json"
    command = [sys.executable, str(BENCHMARKS / "batch_quality.py"), "--quick", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    made = json.loads(output.read_text())
    assert made.keys() == committed.keys()
    assert made["settings"].keys() == committed["settings"].keys()
    for rows, before in zip(tables(script, made), tables(script, committed), strict=True):
        assert {name: row.keys() for name, row in rows.items()} == {name: row.keys() for name, row in before.items()}
    assert all(name in run.stdout for name in script["VARIANTS"])
