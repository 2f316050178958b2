"""The benchmark of regimes runs, and what the repository says of it is what its runs show."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy import stats

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
README = (BENCHMARKS / "README.md").read_text()


@pytest.fixture
def regimes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("regimes")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("regimes_report")


@pytest.fixture
def committed() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "regimes.json").read_text())


def test_a_cell_is_measured_for_real_and_goes_on_where_it_was(
    regimes: ModuleType, report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = (regimes.PLAIN, "EMA")
    monkeypatch.setattr(regimes, "TRICKS", {name: regimes.TRICKS[name] for name in some})
    monkeypatch.setattr(regimes, "CELLS", [("digits", "clean")])
    scale = regimes.Scale((0, 1), (100, 101), (2, 3), epochs=1, batches=3)
    cell = regimes.measure("digits", "clean", scale, tmp_path / "runs")
    made = regimes.result([cell], scale)
    assert {(each["regime"], each["trick"]) for each in made["rows"]} == {
        (regime, trick) for regime in ("clean", *regimes.SHIFTS) for trick in some
    }
    assert {each["trick"]: each["seeds"] for each in made["rows"]} == {"plain": 4, "EMA": 4}
    assert len({run["test_loss"] for run in made["runs"]}) > 10  # of 14: learning rates, tricks and seeds differ
    text = report.section(made)
    assert "|EMA|" in text
    assert "**On shifted test images**, better than plain training: " in text
    report.draw(made, tmp_path / "regimes.png")
    assert (tmp_path / "regimes.png").stat().st_size > 10_000
    runs = sorted((tmp_path / "runs").rglob("seed*.json"))
    times = {path: path.stat().st_mtime_ns for path in runs}
    runs[0].unlink()
    again = regimes.measure("digits", "clean", scale, tmp_path / "runs")
    assert [{**run, "seconds": 0} for run in again["runs"]] == [{**run, "seconds": 0} for run in cell["runs"]]
    assert [path for path in runs if path.stat().st_mtime_ns != times[path]] == runs[:1]


@pytest.mark.slow
def test_every_trick_runs_in_every_cell(regimes: ModuleType, report: ModuleType, tmp_path: Path) -> None:
    cells = [regimes.measure(task, regime, regimes.REDUCED, tmp_path) for task, regime in regimes.CELLS]
    made = regimes.result(cells, regimes.REDUCED)
    committed = json.loads((BENCHMARKS / "results" / "regimes.json").read_text())
    assert {name: [*tricks] for name, tricks in report.columns(made).items()} == {
        name: [*tricks] for name, tricks in report.columns(committed).items()
    }


def test_a_regime_changes_the_training_data_alone(regimes: ModuleType) -> None:
    clean = regimes.split("digits", "clean")
    sizes = clean["train"][1].bincount()
    for regime in regimes.REGIMES:
        found = regimes.split("digits", regime)
        for part in ("val", "test"):
            assert all(torch.equal(*pair) for pair in zip(found[part], clean[part], strict=True))
    for noise in (0.2, 0.4):
        inputs, labels = regimes.split("digits", f"{noise:.0%} wrong labels")["train"]
        assert torch.equal(inputs, clean["train"][0])
        assert (labels != clean["train"][1]).float().mean() == pytest.approx(noise, abs=0.03)
    few = regimes.split("digits", "10% of the samples")["train"][1].bincount()
    assert torch.allclose(few / sizes, torch.tensor(0.1), atol=0.01)
    shares = regimes.split("digits", "long tail")["train"][1].bincount() / sizes
    assert shares.tolist() == pytest.approx([0.1 ** (number / 9) for number in range(10)], abs=0.01)


def test_shifted_images_are_those_of_scipy_and_scikit_image(regimes: ModuleType) -> None:
    ndimage, transform = pytest.importorskip("scipy.ndimage"), pytest.importorskip("skimage.transform")
    images = regimes.split("digits", "clean")["test"][0][:3]
    for image, blurred, turned in zip(
        images, regimes.shifted(images, "blur"), regimes.shifted(images, "rotation"), strict=True
    ):
        mean = ndimage.uniform_filter(image[0].numpy(), 3)
        assert blurred[0, 1:-1, 1:-1].numpy() == pytest.approx(mean[1:-1, 1:-1], abs=1e-5)
        rotated = transform.rotate(image[0].numpy(), 20, order=1, mode="edge")
        assert turned[0].numpy() == pytest.approx(rotated, abs=1e-4)
    noise = regimes.shifted(images, "noise") - images
    assert noise.std() / images.std() == pytest.approx(0.5, abs=0.1)


def test_the_language_model_sees_no_character_that_it_predicts(regimes: ModuleType) -> None:
    text = regimes.load_text()
    for inputs, following in text.values():
        assert torch.equal(inputs[:, 1:], following[:, :-1])
    network = regimes.CharacterTransformer().eval()
    inputs = text["test"][0][:2].clone()
    before = network(inputs)
    inputs[:, 20:] = 0
    assert torch.allclose(network(inputs)[:, :20], before[:, :20], atol=1e-5)
    assert not torch.allclose(network(inputs)[:, 20:], before[:, 20:], atol=1e-2)


def test_metrics_are_those_by_hand(regimes: ModuleType) -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
    module = regimes.Measured(torch.nn.Identity(), 2)
    logged: dict[str, Any] = {}
    module.log_dict = lambda values, **_: logged.update(values)
    module.test_step((probabilities.log(), torch.tensor([0, 0, 0, 1])), 0, 1)
    assert logged["noise_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert logged["noise_ece"] == pytest.approx((0.1 + 0.2 + 0.6 + 0.3) / 4)
    assert logged["noise_loss"] == pytest.approx(-sum(map(torch.log, torch.tensor([0.9, 0.8, 0.4, 0.7]))) / 4)


def test_the_figures_have_every_cell(regimes: ModuleType, committed: dict[str, Any]) -> None:
    found = {(each["task"], each["regime"], each["trick"]): each for each in committed["rows"]}
    wanted = [
        (task, column, name)
        for task, regime in regimes.CELLS
        for column in (regime, *(regimes.SHIFTS if regime == "clean" and task in regimes.PICTURES else ()))
        for name, trick in regimes.TRICKS.items()
        if task in trick.tasks and regime in trick.regimes
    ]
    assert list(found) == wanted
    for (task, _, name), each in found.items():
        more = task == regimes.MORE[0] and name in (regimes.PLAIN, regimes.MORE[1])
        assert each["seeds"] == (15 if more else 5)
    settings = committed["settings"]
    assert settings["tricks"] == [*regimes.TRICKS]
    assert settings["epochs"] is settings["batches"] is None
    assert not {*settings["seeds"], *settings["more_seeds"]} & {*settings["sweep_seeds"]}
    for name, task in regimes.TASKS.items():
        assert (settings["tasks"][name]["epochs"], settings["tasks"][name]["lrs"]) == (task.epochs, list(task.lrs))


def test_the_rows_are_those_of_the_runs(report: ModuleType, committed: dict[str, Any]) -> None:
    assert report.rows(committed["runs"]) == committed["rows"]
    runs = {
        (run["task"], run["regime"], run["trick"], run["seed"]): run
        for run in committed["runs"]
        if run["part"] != "learning rates"
    }
    for row in committed["rows"]:
        if row["trick"] == "plain":
            continue
        shifted = row["regime"] in report.SHIFTS
        cell, part = (row["task"], "clean" if shifted else row["regime"]), row["regime"] if shifted else "test"
        score = ("loss", -100) if row["task"] == "text" else ("accuracy", 100)
        for gain, (metric, factor) in {"gain": score, "ece_gain": ("ece", -100)}.items():
            mine, plain = (
                [factor * runs[(*cell, trick, seed)][f"{part}_{metric}"] for seed in range(row["seeds"])]
                for trick in (row["trick"], "plain")
            )
            limits = stats.ttest_rel(mine, plain).confidence_interval(0.95)
            assert [row[gain]["low"], row[gain]["high"]] == pytest.approx([*limits], abs=0.01)


def test_a_learning_rate_is_the_one_that_validates_best_on_other_seeds(committed: dict[str, Any]) -> None:
    lrs = {(each["task"], each["regime"], each["trick"]): each["lr"] for each in committed["rows"]}
    for sweep in committed["sweep"]:
        cell = (sweep["task"], sweep["regime"], sweep["trick"])
        metric, best = ("val_loss", min) if sweep["task"] == "text" else ("val_accuracy", max)
        means = {}
        for run in committed["runs"]:
            if run["part"] == "learning rates" and (run["task"], run["regime"], run["trick"]) == cell:
                means.setdefault(run["lr"], []).append(run[metric])
        assert {float(lr): mean for lr, mean in sweep[metric].items()} == {
            lr: round(fmean(each), 4) for lr, each in means.items()
        }
        assert lrs[cell] == sweep["lr"] == best(means, key=lambda lr, means=means: round(fmean(means[lr]), 4))


def test_the_readme_says_what_the_figures_say(report: ModuleType, committed: dict[str, Any]) -> None:
    assert report.section(committed) in README
    assert (BENCHMARKS / "results" / "regimes.png").exists()
    assert "all tricks are at chance, 33.3%" in README
    noisy = [each["mean"] for each in committed["rows"] if (each["task"], each["regime"]) == ("textures", "noise")]
    assert noisy == pytest.approx([100 / 3] * len(noisy), abs=0.2)
    head, sentences = report.conclusions(committed)
    rows = {(each["trick"], each["task"], each["regime"]): each for each in committed["rows"]}
    named = 0
    for line in sentences.splitlines():
        gain = "ece_gain" if "calibration" in line else "gain"
        for words, better in zip(
            line.split("better than plain training: ")[1].split("; worse: "), (1, -1), strict=True
        ):
            found = re.findall(r"(?:^|, )([^()]+) in (\d+) of \d+ \(([+-][\d.]+) on (\w+), ([^)]+)\)", words)
            for trick, count, points, task, regime in found:
                assert f"{rows[trick, task, regime][gain]['points']:+.1f}" == points
                limits = [each[gain] for (name, _, _), each in rows.items() if name == trick]
                told = [each for each in limits if better * each["low"] > 0 < better * each["high"]]
                assert len(told) >= int(count) > 0
                if gain == "ece_gain":  # of all columns
                    assert len(told) == int(count)
                    assert max(better * each["points"] for each in told) == pytest.approx(abs(float(points)), abs=0.06)
                named += 1
    assert named > 10
    told = [each["gain"]["low"] * each["gain"]["high"] > 0 for (name, _, _), each in rows.items() if name != "plain"]
    assert f"{sum(told)} of {len(told)} intervals of scores leave" in head
