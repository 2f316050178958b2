"""The benchmark of quality runs, and what the repository says of it is what its runs show."""

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
from sklearn.utils.class_weight import compute_class_weight

from lightning_tricks.optimizers.by_name import is_hidden

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


@pytest.mark.slow
def test_a_cell_is_measured_for_real_and_goes_on_where_it_was(
    quality: ModuleType, report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = (quality.PLAIN, "EMA", "Lion")
    monkeypatch.setattr(quality, "TRICKS", {name: quality.TRICKS[name] for name in some})
    monkeypatch.setattr(quality, "CELLS", [("digits", "clean")])
    scale = quality.Scale(2, epochs=1, batches=3)
    cell = quality.measure("digits", "clean", scale, tmp_path / "runs")
    made = quality.result([cell], scale)
    assert {(each["regime"], each["trick"]) for each in made["rows"]} == {
        (regime, trick) for regime in ("clean", *quality.SHIFTS) for trick in some
    }
    assert {each["trick"]: each["seeds"] for each in made["rows"]} == {"plain": 2, "EMA": 2, "Lion": 2}
    results = {(run.get("val_accuracy"), run.get("test_ece")) for run in made["runs"]}
    assert len(results) > len(made["runs"]) - 4  # learning rates, tricks and seeds differ
    text = report.section(made)
    assert "|EMA|" in text
    assert "**On shifted test data**, better than plain training: " in text
    report.draw(tmp_path / "quality.svg", made)
    assert (tmp_path / "quality.svg").stat().st_size > 10_000
    runs = sorted((tmp_path / "runs").rglob("seed*.json"))
    times = {path: path.stat().st_mtime_ns for path in runs}
    runs[0].unlink()
    again = quality.measure("digits", "clean", scale, tmp_path / "runs")
    assert [{**run, "seconds": 0} for run in again["runs"]] == [{**run, "seconds": 0} for run in cell["runs"]]
    assert [path for path in runs if path.stat().st_mtime_ns != times[path]] == runs[:1]


@pytest.mark.slow
def test_some_tricks_are_measured_anew_and_the_others_stay_as_they_are(
    quality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = (quality.PLAIN, "EMA", "Muon", "Muon, both rates")
    tricks = {name: quality.TRICKS[name]._replace(tasks=("digits",)) for name in some}
    monkeypatch.setattr(quality, "TRICKS", tricks)
    monkeypatch.setattr(quality, "CELLS", [("digits", "clean")])
    scale = quality.Scale(2, epochs=1, batches=2, tunes=False)
    kept = quality.result([quality.measure("digits", "clean", scale, tmp_path / "all")], scale)
    kept["machine"], anew = {"cpu": "another one"}, ("EMA", "Muon, both rates")
    tricks = {name: tricks[name] for name in (quality.PLAIN, *anew)}
    tricks["Muon, both rates"] = tricks["Muon, both rates"]._replace(lr=(0.1, 0.03))
    found = quality.measure("digits", "clean", scale, tmp_path / "some", tricks, plain_lr=0.3)
    made = quality.result([found], scale, kept, anew)
    for part in ("sweep", "rows", "runs"):
        places = [(each.get("part"), each["regime"], each["trick"], each.get("seed")) for each in made[part]]
        assert sorted(places, key=str) == sorted(dict.fromkeys(places), key=str), "each once"
        first, second = ([each for each in of[part] if each["trick"] not in anew] for of in (kept, made))
        assert first == second
    assert [each["trick"] for each in made["rows"]] == [*some] * 4
    rates = {each["trick"]: (each["lr"], each.get("adamw_lr")) for each in made["rows"]}
    assert rates == {"plain": (0.1, None), "EMA": (0.3, None), "Muon": (0.01, None), "Muon, both rates": (0.1, 0.03)}
    plain = [run for run in found["runs"] if run["trick"] == "plain"]
    assert made["controls"] == [{"tricks": [*anew], **run} for run in plain]
    for row in (each for each in made["rows"] if each["trick"] in anew and each["regime"] == "clean"):
        mine, other = (
            fmean(100 * run["test_accuracy"] for run in found["runs"] if run["trick"] == name)
            for name in (row["trick"], "plain")
        )
        assert row["gain"]["points"] == pytest.approx(mine - other, abs=0.001)
    again = quality.result([found], scale, made, ["EMA"])
    assert [each["tricks"] for each in again["controls"]] == [["Muon, both rates"]] * 2 + [["EMA"]] * 2
    assert made["machine"] == {"cpu": "another one"} != made["renewed"]["EMA"] == made["renewed"]["Muon, both rates"]


def test_of_two_rates_each_has_its_neighbours(quality: ModuleType) -> None:
    assert quality.neighbours(0.01) == [0.003, 0.03]
    assert quality.neighbours((0.01, 3.0)) == [(0.003, 3.0), (0.03, 3.0), (0.01, 1.0), (0.01, 10.0)]
    rates = (0.001, 0.003, 0.01, 0.03, 0.1)
    assert quality.first((0.01, 0.01)) == [(one, other) for one in rates for other in rates]
    for name in ("Muon, both rates", "AdamW, both rates"):
        _, module, _ = quality.fit("glosses", "clean", quality.TRICKS[name], (0.01, 0.03), quality.REDUCED, Path())
        made = module.configure_optimizers()
        assert type(made).__name__ == name.split(",")[0]
        hidden = is_hidden(module)
        assert len(hidden) == 4
        for group in made.param_groups:
            assert {group["lr"]} == {0.01 if weight in hidden else 0.03 for weight in group["params"]}


@pytest.mark.slow
def test_every_trick_runs_in_every_cell(quality: ModuleType, report: ModuleType, tmp_path: Path) -> None:
    cells = [quality.measure(task, regime, quality.REDUCED, tmp_path) for task, regime in quality.CELLS]
    made = quality.result(cells, quality.REDUCED)
    committed = json.loads((BENCHMARKS / "results" / "quality.json").read_text())
    assert {name: [*tricks] for name, tricks in report.columns(made).items()} == {
        name: [*tricks] for name, tricks in report.columns(committed).items()
    }


def test_a_regime_changes_the_training_data_alone(quality: ModuleType) -> None:
    clean = quality.split("digits", "clean")
    sizes = clean["train"][1].bincount()
    for regime in quality.REGIMES:
        found = quality.split("digits", regime)
        for part in ("val", "test"):
            assert all(torch.equal(*pair) for pair in zip(found[part], clean[part], strict=True))
    for noise in (0.2, 0.4):
        inputs, labels = quality.split("digits", f"{noise:.0%} wrong labels")["train"]
        assert torch.equal(inputs, clean["train"][0])
        assert (labels != clean["train"][1]).float().mean() == pytest.approx(noise, abs=0.03)
    few = quality.split("digits", "10% of the samples")["train"][1].bincount()
    assert torch.allclose(few / sizes, torch.tensor(0.1), atol=0.01)
    shares = quality.split("digits", "long tail")["train"][1].bincount() / sizes
    assert shares.tolist() == pytest.approx([0.1 ** (number / 9) for number in range(10)], abs=0.01)


def test_rare_classes_weigh_more_or_are_drawn_as_often(quality: ModuleType) -> None:
    labels = quality.split("digits", "long tail")["train"][1]
    weights = compute_class_weight("balanced", classes=torch.arange(10).numpy(), y=labels.numpy())
    arms = {
        name: quality.fit("digits", "long tail", quality.TRICKS[name], 0.1, quality.REDUCED, Path())
        for name in ("class weights", "balanced sampling", "plain")
    }
    _, module, data = arms["class weights"]
    data.setup("fit")
    images, some = next(iter(data.train_dataloader()))
    losses = torch.nn.functional.cross_entropy(module.network(images), some, reduction="none").double().detach()
    mine = torch.from_numpy(weights)[some]
    assert float(module.training_step((images, some), 0).detach()) == pytest.approx(
        float((mine * losses).sum() / mine.sum())
    )
    shares = {}
    for name, (_, _, data) in arms.items():
        torch.manual_seed(0)
        data.setup("fit")
        drawn = torch.cat([some for _ in range(20) for _, some in data.train_dataloader()])
        assert len(drawn) == 20 * len(labels)
        shares[name] = drawn.bincount(minlength=10) / len(drawn)
    assert shares["plain"].tolist() == shares["class weights"].tolist() == (labels.bincount() / len(labels)).tolist()
    assert shares["balanced sampling"].tolist() == pytest.approx([0.1] * 10, abs=0.02)


def test_shifted_images_are_those_of_scipy_and_scikit_image(quality: ModuleType) -> None:
    ndimage, transform = pytest.importorskip("scipy.ndimage"), pytest.importorskip("skimage.transform")
    images = quality.split("digits", "clean")["test"][0][:3]
    blurs, turns, noisy = (quality.shifted("digits", images, shift) for shift in ("blur", "rotation", "noise"))
    for image, blurred, turned in zip(images, blurs, turns, strict=True):
        mean = ndimage.uniform_filter(image[0].numpy(), 3)
        assert blurred[0, 1:-1, 1:-1].numpy() == pytest.approx(mean[1:-1, 1:-1], abs=1e-5)
        rotated = transform.rotate(image[0].numpy(), 20, order=1, mode="edge")
        assert turned[0].numpy() == pytest.approx(rotated, abs=1e-4)
    assert (noisy - images).std() / images.std() == pytest.approx(quality.NOISE["digits"], rel=0.05)


@pytest.mark.parametrize("task", ["glosses", "text"])
def test_noise_in_texts_replaces_a_share_of_the_words_by_other_ones(quality: ModuleType, task: str) -> None:
    inputs = quality.split(task, "clean")["test"][0]
    noisy = quality.shifted(task, inputs, "noise")
    words = inputs > 0
    assert torch.equal(noisy[~words], inputs[~words])
    assert (noisy[words] > 0).all()
    others = (torch.bincount(inputs[words]) / words.sum()).square().sum()  # another word may be the same one
    replaced = (noisy != inputs)[words].float().mean() / (1 - others)
    assert 0.5 * quality.REPLACED < replaced < 1.05 * quality.REPLACED


def test_the_language_model_sees_no_character_that_it_predicts(quality: ModuleType) -> None:
    text = quality.load_text()
    for inputs, following in text.values():
        assert torch.equal(inputs[:, 1:], following[:, :-1])
    network = quality.CharacterTransformer().eval()
    inputs = text["test"][0][:2].clone()
    before = network(inputs)
    inputs[:, 20:] = 0
    assert torch.allclose(network(inputs)[:, :20], before[:, :20], atol=1e-5)
    assert not torch.allclose(network(inputs)[:, 20:], before[:, 20:], atol=1e-2)


def test_metrics_are_those_by_hand(quality: ModuleType) -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
    module = quality.Measured(torch.nn.Identity(), 2)
    logged: dict[str, Any] = {}
    module.log_dict = lambda values, **_: logged.update(values)
    module.test_step((probabilities.log(), torch.tensor([0, 0, 0, 1])), 0, 1)
    assert logged["noise_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert logged["noise_ece"] == pytest.approx((0.1 + 0.2 + 0.6 + 0.3) / 4)
    assert logged["noise_loss"] == pytest.approx(-sum(map(torch.log, torch.tensor([0.9, 0.8, 0.4, 0.7]))) / 4)


def test_runs_that_did_not_train_are_named_with_their_task_and_regime(report: ModuleType) -> None:
    """A run is compared with the median of its own task and regime, and those that choose a rate do not count."""

    def runs(trick: str, *accuracies: float, regime: str = "clean", part: str = "finals") -> list[dict[str, Any]]:
        return [
            {"part": part, "task": "digits", "regime": regime, "trick": trick, "test_accuracy": each}
            for each in accuracies
        ]

    trained = runs("plain", 0.9, 0.9, 0.9, 0.46) + runs("Lion", 0.44, 0.1, 0.9) + runs("Muon", 0.9, 0.9)
    sweep = runs("Lion", 0.1, part=report.SWEEP)
    told = "Runs with less than half of the median accuracy in their task and regime: {}."
    assert report.collapsed(trained + sweep) == told.format("Lion (digits, clean: 2)")
    hard = runs("plain", 0.3, 0.3, regime="wrong") + runs("SAM", 0.3, 0.1, regime="wrong")
    assert report.collapsed(trained + hard) == told.format("Lion (digits, clean: 2); SAM (digits, wrong: 1)")
    losses = [{"part": "finals", "task": "text", "regime": "clean", "trick": "EMA", "test_loss": 1.0}]
    assert report.collapsed(sweep + losses + hard[:3]) == told.format("none")


def test_the_figures_have_every_cell(quality: ModuleType, committed: dict[str, Any]) -> None:
    found = {(each["task"], each["regime"], each["trick"]): each for each in committed["rows"]}
    wanted = [
        (task, column, name)
        for task, regime in quality.CELLS
        for column in (regime, *(quality.shifts(task) if regime == "clean" else ()))
        for name, trick in quality.TRICKS.items()
        if task in trick.tasks
    ]
    assert list(found) == wanted
    assert all(each["seeds"] == quality.TASKS[task].seeds for (task, _, _), each in found.items())
    settings = committed["settings"]
    assert settings["tricks"] == [*quality.TRICKS]
    assert settings["seeds"] is settings["epochs"] is settings["batches"] is None
    assert min(settings["sweep_seeds"]) > max(task.seeds for task in quality.TASKS.values())
    for name, task in quality.TASKS.items():
        assert (settings["tasks"][name]["epochs"], settings["tasks"][name]["lr"]) == (task.epochs, task.lr)


@pytest.mark.slow
def test_the_rows_are_those_of_the_runs(report: ModuleType, committed: dict[str, Any]) -> None:
    assert report.rows(committed["runs"], committed["controls"]) == committed["rows"]
    controls = {
        (run["task"], run["regime"], trick, run["seed"]): run
        for run in committed["controls"]
        for trick in run["tricks"]
    }
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
            seeds = [(*cell, row["trick"], seed) for seed in range(row["seeds"])]
            mine = [factor * runs[each][f"{part}_{metric}"] for each in seeds]
            plain = [
                factor * controls.get(each, runs[(*cell, "plain", each[-1])])[f"{part}_{metric}"] for each in seeds
            ]
            limits = stats.ttest_rel(mine, plain).confidence_interval(0.95)
            assert [row[gain]["low"], row[gain]["high"]] == pytest.approx([*limits], abs=0.01)


@pytest.mark.parametrize("name", ["quality", "claims"])
def test_a_learning_rate_is_the_one_that_validates_best_on_other_seeds(quality: ModuleType, name: str) -> None:
    committed = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    lrs = {
        (run["task"], run["regime"], run["trick"]): rate_of(run)
        for run in committed["runs"]
        if run["part"] != "learning rates"
    }
    for sweep in committed["sweep"]:
        cell = (sweep["task"], sweep["regime"], sweep["trick"])
        metric, best = ("val_loss", min) if sweep["task"] == "text" else ("val_accuracy", max)
        means = {}
        for run in committed["runs"]:
            if run["part"] == "learning rates" and (run["task"], run["regime"], run["trick"]) == cell:
                means.setdefault(rate_of(run), []).append(run[metric])
        assert sweep[metric] == {str(lr): round(fmean(each), 4) for lr, each in means.items()}
        assert lrs[cell] == rate_of(sweep) == best(means, key=lambda lr, means=means: round(fmean(means[lr]), 4))
        assert {*quality.neighbours(rate_of(sweep))} <= means.keys()  # neither is better


def rate_of(line: dict[str, Any]) -> float | tuple[float, float]:
    return (line["lr"], line["adamw_lr"]) if "adamw_lr" in line else line["lr"]


COLUMNS = {
    "With wrong labels": lambda task, regime: task != "text" and "wrong" in regime,
    "With clean, few or long-tailed training data": lambda task, regime: (
        task != "text" and regime in ("clean", "10% of the samples", "long tail")
    ),
    "On shifted test data": lambda task, regime: task != "text" and regime in ("noise", "blur", "rotation"),
    "For the language model": lambda task, _: task == "text",
    "By calibration error, in all columns": lambda *_: True,
}


def test_the_readme_says_what_the_figures_say(report: ModuleType, committed: dict[str, Any]) -> None:
    assert report.section(committed) in README
    head, sentences, _ = report.conclusions(committed)
    rows = {(each["trick"], each["task"], each["regime"]): each for each in committed["rows"]}
    named = 0
    for line in sentences.splitlines():
        gain, belongs = "ece_gain" if "calibration" in line else "gain", COLUMNS[line.split("**")[1]]
        for words, better in zip(
            line.split("better than plain training: ")[1].split("; worse: "), (1, -1), strict=True
        ):
            found = re.findall(r"(?:^|, )([^()]+) in (\d+) of \d+ \(([+-][\d.]+) on (\w+), ([^)]+)\)", words)
            for trick, count, points, task, regime in found:
                assert f"{rows[trick, task, regime][gain]['points']:+.1f}" == points
                limits = [each[gain] for (name, *where), each in rows.items() if name == trick and belongs(*where)]
                told = [each for each in limits if better * each["low"] > 0 < better * each["high"]]
                assert len(told) == int(count)
                assert max(better * each["points"] for each in told) == pytest.approx(abs(float(points)), abs=0.06)
                named += 1
    assert named > 10
    told = [each["gain"]["low"] * each["gain"]["high"] > 0 for (name, _, _), each in rows.items() if name != "plain"]
    assert f"{sum(told)} of {len(told)} intervals of scores leave" in head
