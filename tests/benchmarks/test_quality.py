"""The benchmark of quality runs, and the figures in the repository are those that its runs make."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
from scipy import stats

import lightning_tricks as lt

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
README = (BENCHMARKS / "README.md").read_text()


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("quality")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("quality_report")


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "quality.json").read_text())


def rows(committed: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["setting"], row["trick"]): row for row in committed["rows"]}


def runs(committed: dict[str, Any], row: dict[str, Any], lr: float) -> list[dict[str, float]]:
    """The runs that count of a row, by seed."""
    value = None if row["trick"] == "plain" else row["strength"]
    stem = f"{row['setting']} | {row['trick']} | {value} | lr {lr} | seed "
    done = {run["job"]: run for run in committed["runs"]}
    return [done[f"{stem}{seed}"] for seed in committed["settings"]["seeds"]]


def test_the_figures_have_every_cell(quality: ModuleType, committed: dict[str, Any]) -> None:
    cells = [
        (f"{task}, {labels}", name)
        for task, labels in quality.SETTINGS
        for name, trick in quality.TRICKS.items()
        if task in trick.tasks
    ]
    assert list(rows(committed)) == cells
    assert {"cpu", "torch", "lightning", "scikit-learn", "scikit-image", "timm"} < committed["machine"].keys()
    settings = committed["settings"]
    assert settings["seeds"] == list(quality.SEEDS)
    assert not set(settings["seeds"]) & set(settings["sweep_seeds"])
    assert settings["epochs"] is settings["batches"] is None
    for name, task in quality.TASKS.items():
        assert settings["tasks"][name]["epochs"] == task.epochs
        assert settings["tasks"][name]["lrs"] == list(task.lrs)


def test_the_rows_are_those_of_the_runs(report: ModuleType, committed: dict[str, Any]) -> None:
    found = rows(committed)
    for setting in dict.fromkeys(setting for setting, _ in found):
        mine = {trick: row for (each, trick), row in found.items() if each == setting}
        lr = mine["plain"]["strength"]
        made = report.figures(
            setting,
            {trick: runs(committed, row, lr) for trick, row in mine.items()},
            {trick: row["strength"] for trick, row in mine.items()},
        )
        assert made == list(mine.values())


def test_a_strength_is_the_one_that_validates_best_on_other_seeds(committed: dict[str, Any]) -> None:
    found = rows(committed)
    for sweep in committed["sweep"]:
        row = found[sweep["setting"], sweep["trick"]]
        assert row["strength"] == float(max(sweep["val"], key=lambda value: sweep["val"][value]))
        if sweep["trick"] == "plain":
            for lr, val in sweep["val"].items():
                stem = f"{sweep['setting']} | plain | None | lr {lr} | seed "
                seeds = [f"{stem}{seed}" for seed in committed["settings"]["sweep_seeds"]]
                assert val == round(fmean(run["val"] for run in committed["runs"] if run["job"] in seeds), 4)


def test_the_tables_are_those_of_the_figures(report: ModuleType, committed: dict[str, Any]) -> None:
    assert report.tables(committed) in README


def test_the_passes_are_counted(committed: dict[str, Any]) -> None:
    dear = {"HardExampleFilter, prune": 5 / 6, "SAM": 2, "SAM + EMA + flat_cos": 2, "plain, twice the epochs": 2}
    for (_, trick), row in rows(committed).items():
        if trick in dear or not trick.startswith("plain"):
            assert row["compute"] == pytest.approx(dear.get(trick, 1), rel=0.02)
            assert row["equal"] is not None or trick.startswith("plain")


def test_differences_are_paired(report: ModuleType) -> None:
    mine, others = (
        [{"test": value, "forward": 1, "backward": 1} for value in values]
        for values in ((0.71, 0.52, 0.63), (0.7, 0.5, 0.6))
    )
    difference = report.paired(mine, others)
    low, high = stats.ttest_rel([71, 52, 63], [70, 50, 60]).confidence_interval(0.95)
    assert difference == {"points": 2.0, "low": round(low, 2), "high": round(high, 2)}
    assert report.sign(difference) == 0
    assert [report.sign({"low": low, "high": high}) for low, high in ((0.1, 2), (-2, -0.1), (-1, 1))] == [1, -1, 0]


def test_equal_compute_is_that_of_plain_training_or_none(report: ModuleType) -> None:
    costs = {"plain": 1.0, "plain, twice": 2.0, "SAM": 2.02, "odd": 1.5, "EMA": 1.0}
    assert [report.at_equal_compute(name, costs) for name in costs] == [None, None, "plain, twice", None, "plain"]


def test_a_setting_is_measured_for_real_and_goes_on_where_it_was(
    quality: ModuleType, report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ("plain", "SAM", "HardExampleFilter, prune", quality.ALL)  # all of them are in the slow test
    two = {name: quality.TRICKS[name]._replace(values=quality.TRICKS[name].values[:2]) for name in some}
    monkeypatch.setattr(quality, "TRICKS", two)
    monkeypatch.setitem(quality.TASKS, "digits", quality.TASKS["digits"]._replace(lrs=quality.TASKS["digits"].lrs[:2]))
    scale = quality.Scale((0, 1), (100, 101), epochs=1, batches=3)
    made = quality.measure("digits", "noisy labels", scale, tmp_path)
    found = {row["trick"]: row for row in made["rows"]}
    assert tuple(found) == some
    assert (found["SAM"]["compute"], found["HardExampleFilter, prune"]["compute"]) == (2.0, 0.833)
    assert {row["trick"] for row in made["sweep"]} == {"plain", "SAM"}
    tests = {run["test"] for run in made["runs"]}
    assert len(tests) > 10  # of 22 runs: tricks differ, seeds differ
    assert "|SAM + EMA + flat_cos|" in report.tables({**made, "machine": {}})
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("seed*.json")}
    assert len(runs) == len(made["runs"])
    lost = sorted(runs)[::7]
    for path in lost:
        path.unlink()
    again = quality.measure("digits", "noisy labels", scale, tmp_path)
    timeless = [[{**run, "seconds": 0} for run in each["runs"]] for each in (made, again)]
    assert timeless[0] == timeless[1]
    assert {path for path in runs if path.stat().st_mtime_ns != runs[path]} == {*lost}


def test_the_jobs_are_those_of_the_figures(quality: ModuleType, committed: dict[str, Any]) -> None:
    jobs = [run["job"] for run in committed["runs"]]
    assert f"digits, clean labels | {quality.Variant('plain', None, 0.2)} | seed 4" in jobs
    assert f"digits, clean labels | {quality.Variant('SAM', 0.3, 0.2)} | seed 101" in jobs


def test_a_run_that_fails_is_no_figure(quality: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        quality.run_of({"error": "MemoryError: no memory"})


def test_what_five_seeds_tell_is_said_as_it_was_measured(report: ModuleType, committed: dict[str, Any]) -> None:
    script = importlib.import_module("five_seeds")
    made = json.loads((BENCHMARKS / "results" / "five_seeds.json").read_text())
    assert made["rows"] == script.rows(made["runs"])
    assert rows(committed)["digits, noisy labels", "plain"]["strength"] == script.LR
    told = " ".join((BENCHMARKS.parent / "docs" / "compare.md").read_text().split())
    quality = rows(committed)["digits, noisy labels", "EMA"]["over_plain"]
    for row in [*made["rows"][:3], quality]:
        assert f"{row['points']:+.1f}" in told
        assert f"({row['low']:+.1f} to {row['high']:+.1f})" in told
    assert made["rows"][3]["points"] < quality["low"]


@pytest.mark.slow
@pytest.mark.parametrize("trick", ["EMA", "plain, 1/4 of the epochs"])
def test_a_comparison_reproduces_the_figures_within_their_intervals(
    trick: str, quality: ModuleType, committed: dict[str, Any], tmp_path: Path
) -> None:
    row, plain = (rows(committed)["digits, noisy labels", name] for name in (trick, "plain"))
    arms = {
        name: partial(
            quality.fit, "digits", "noisy labels", quality.Variant(name, None, plain["strength"]), quality.Scale()
        )
        for name in ("plain", trick)
    }
    settings: dict[str, Any] = {"metric": "test_accuracy", "mode": "max", "seeds": quality.SEEDS}
    result = lt.compare(arms, folder=tmp_path, **settings)
    found = result.difference(trick)
    assert found is not None
    assert row["over_plain"]["low"] < 100 * found.high  # the intervals overlap: other orders of the data, five seeds
    assert 100 * found.low < row["over_plain"]["high"]
    assert found.mean * row["over_plain"]["points"] > 0
    assert 100 * fmean(result.values("plain")) == pytest.approx(plain["test_mean"], abs=2 * plain["test_std"])


@pytest.mark.slow
def test_the_script_makes_these_figures(committed: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "quality.py"), "--reduced", "--processes", "2"]
    run = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    made = json.loads((tmp_path / "quality.json").read_text())
    assert made.keys() == committed.keys()
    assert list(rows(made)) == list(rows(committed))
    assert {tuple(row) for row in made["rows"]} == {tuple(row) for row in committed["rows"]}
    assert "|points over plain|" in run.stdout


def told(report: ModuleType, committed: dict[str, Any], trick: str, better: int) -> set[str]:
    """The settings in which the interval tells a trick from plain training."""
    mine = {setting: row for (setting, each), row in rows(committed).items() if each == trick}
    return {setting for setting, row in mine.items() if report.sign(row["over_plain"]) == better}


def test_the_reading_is_that_of_the_figures(report: ModuleType, committed: dict[str, Any]) -> None:
    found = rows(committed)
    noisy = {setting for setting, _ in found if "noisy" in setting}
    for trick in ("EMA", "SWA", "flat_cos", "one_cycle", "SAM", "SAM + EMA + flat_cos"):
        assert told(report, committed, trick, 1) == {"digits, noisy labels", "textures, noisy labels"}
        assert not told(report, committed, trick, -1)
    assert found["digits, clean labels", "plain"]["strength"] == 0.2
    for trick in ("HardExampleFilter, prune", "HardExampleFilter, loss"):
        assert told(report, committed, trick, -1) == noisy | {"digits, clean labels"}
    for trick in ("Mixup", "HiddenMixup", "AutoClip"):
        assert not told(report, committed, trick, 1) | told(report, committed, trick, -1)
    assert told(report, committed, "label smoothing", 1) == {"digits, clean labels", "glosses, clean labels"}
    assert told(report, committed, "CutMix", 1) == {"textures, noisy labels"}
    assert told(report, committed, "plain, twice the epochs", -1) == {"digits, noisy labels", "glosses, noisy labels"}
    assert found["textures, noisy labels", "plain"]["test_std"] > 10
    for setting in noisy:
        lr = found[setting, "plain"]["strength"]
        both = [runs(committed, found[setting, trick], lr) for trick in ("SAM + EMA + flat_cos", "EMA")]
        assert report.sign(report.paired(*both)) <= 0
