"""README, guide and evidence page: their figures are those of the committed runs, their code runs."""

from __future__ import annotations

import ast
import json
import os
import re
import statistics
from functools import cache
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lightning_tricks as lt
from lightning_tricks.core.install import REPOSITORY, SOURCE
from lightning_tricks.evaluation.statistics import paired_difference
from lightning_tricks.examples.digits import LR
from lightning_tricks_cli.cards import card
from lightning_tricks_cli.catalogue import CATALOGUE, Row
from lightning_tricks_cli.main import parser
from lightning_tricks_cli.runs.demo import EPOCHS
from tests.ranks import run_alone

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = " ".join((ROOT / "docs" / "choose.md").read_text().split())
EVIDENCE, COSTS = (
    " ".join(part.split())
    for part in re.sub(
        "<details>.*?</details>", "", (ROOT / "benchmarks" / "README.md").read_text(), flags=re.DOTALL
    ).split("## What tricks cost")
)
RESULTS = ROOT / "benchmarks" / "results"
WRONG_LABELS = "40% wrong labels"
ALL, LOSS = "SAM + EMA + flat_cos", 'HardExampleFilter, mode="loss"'


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def gains(metric: str = "gain") -> dict[str, dict[tuple[str, str], dict[str, float]]]:
    """Of each trick the difference from plain training, by task and regime."""
    found: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for row in result("quality")["rows"]:
        if row["trick"] != "plain":
            found.setdefault(row["trick"], {})[row["task"], row["regime"]] = row[metric]
    return found


def told(trick: str, sign: int, metric: str = "gain") -> set[tuple[str, str]]:
    """Where the intervals tell a trick to be better (1) or worse (-1)."""
    rows = gains(metric)[trick].items()
    return {where for where, gain in rows if (gain["low"] > 0) - (gain["high"] < 0) == sign}


def counts(trick: str) -> tuple[int, int, int]:
    """In how many settings a trick is better, worse, and measured."""
    return len(told(trick, 1)), len(told(trick, -1)), len(gains()[trick])


def points(trick: str, task: str, regime: str = "clean", metric: str = "gain") -> str:
    """A gain as pages have it."""
    return f"{gains(metric)[trick][task, regime]['points']:+.1f}"


def runs(task: str, regime: str, trick: str) -> dict[int, dict[str, float]]:
    """The final runs of a trick by seed."""
    return {
        run["seed"]: run
        for run in result("quality")["runs"]
        if (run["task"], run["regime"], run["trick"]) == (task, regime, trick) and run["part"] != "learning rates"
    }


def over(trick: str, other: str) -> dict[tuple[str, str], int]:
    """Where the intervals tell a trick to be better (1) or worse (-1) than another one, or neither (0)."""
    found = {}
    for task, regime in gains()[trick]:
        shifted = regime in ("noise", "blur", "rotation")
        one, another = (runs(task, "clean" if shifted else regime, name) for name in (trick, other))
        metric = f"{regime if shifted else 'test'}_{'loss' if task == 'text' else 'accuracy'}"
        values = [[each[seed][metric] * (-1 if task == "text" else 1) for seed in one] for each in (one, another)]
        difference = paired_difference(*values)
        found[task, regime] = (difference.low > 0) - (difference.high < 0)
    return found


def better_and_worse(trick: str, other: str) -> tuple[int, int]:
    """In how many of the settings."""
    found = [*over(trick, other).values()]
    assert len(found) == 27
    return found.count(1), found.count(-1)


# -- the gain of one line ---------------------------------------------------------------------------------------------


def test_the_gain_of_the_average_is_that_of_all_fifteen_seeds() -> None:
    gain = gains()["EMA"]["digits", WRONG_LABELS]
    interval = f"{gain['low']:+.1f} to {gain['high']:+.1f}"
    text = " ".join(README.split())
    assert (
        f"it adds {gain['points']:.1f} points of test accuracy (95% interval {interval}, 15 seeds; the median is"
        in text
    )
    plain, ema = (runs("digits", WRONG_LABELS, name) for name in ("plain", "EMA"))
    differences = sorted(100 * (ema[seed]["test_accuracy"] - plain[seed]["test_accuracy"]) for seed in range(15))
    assert f"the median is {differences[7]:.1f}, since three plain runs end badly)" in text
    assert differences[-3] > 9 > 4 > differences[-4]
    assert "; on textures no gain." in text
    assert ("textures", WRONG_LABELS) not in told("EMA", 1) | told("EMA", -1)
    assert len(runs("digits", WRONG_LABELS, "EMA")) == 15
    promise = f"**+{gain['points']:.1f} points of test accuracy** on average (median {differences[7]:.1f}) where 40% of"
    assert f"{promise} the training labels are wrong" in text
    faq = " ".join((ROOT / "docs" / "faq.md").read_text().split())
    assert (
        f"has {gain['points']:.1f} points for `EMA`, the mean of 15 seeds, of which three end badly without it;" in faq
    )
    assert f"the median is {differences[7]:.1f}." in faq
    clean = [points("EMA", task) for task in ("digits", "textures", "glosses")]
    assert f"there is less to gain: {clean[0]}, {clean[1]} and {clean[2]} on" in text
    assert counts("EMA") == counts("SWA") == counts("flat_cos") == (14, 0, 27)
    assert "Of 27 settings it is better in 14 and worse in none, and so is a learning rate that decays" in text


def test_the_table_of_the_page_about_compare_is_that_of_the_fifteen_seeds() -> None:
    page = " ".join((ROOT / "docs" / "compare.md").read_text().split())
    plain, ema = (runs("digits", WRONG_LABELS, name) for name in ("plain", "EMA"))
    values = [[each[seed]["test_accuracy"] for seed in range(15)] for each in (plain, ema)]
    (mean, spread), (other, less) = ((statistics.fmean(each), statistics.stdev(each)) for each in values)
    whole = paired_difference(values[1], values[0])
    time = statistics.median(ema[seed]["seconds"] / plain[seed]["seconds"] for seed in range(15))
    gain = f"{whole.mean:+.4f} ({whole.low:+.4f} to {whole.high:+.4f})"
    assert f"plain {mean:.4f} ± {spread:.2g} 1.00 EMA {other:.4f} ± {less:.2g} {gain} better {time:.2f}" in page
    groups = [paired_difference(*(each[first : first + 5] for each in reversed(values))) for first in (0, 5, 10)]
    first, second, third = (
        f"{100 * each.mean:+.1f} ({100 * each.low:+.1f} to {100 * each.high:+.1f})" for each in groups
    )
    assert f"give {first.replace(' (', ' points (')}, {second} and {third}, and none of the three tells" in page
    assert all(each.low < 0 < each.high for each in groups)
    assert statistics.median(values[0]) - min(values[0]) == pytest.approx(0.1, abs=0.02)  # "end ten points below"


# -- claims about all tasks -------------------------------------------------------------------------------------------


def test_what_the_evidence_page_says_of_averages_and_wrong_labels() -> None:
    assert "each better than plain training in 14 of 27 settings, and worse in none. Directly" in EVIDENCE
    assert better_and_worse("EMA", "flat_cos") == (4, 4)
    assert better_and_worse("EMA + flat_cos", "EMA") == (1, 3)
    few, many = (
        [points("EMA", task, regime)[1:] for task in ("digits", "glosses")]
        for regime in ("20% wrong labels", WRONG_LABELS)
    )
    for task, one, other in zip(("digits", "glosses"), few, many, strict=True):
        assert re.search(rf"{one} and {other} (points )?on {task}", EVIDENCE)
        assert {(task, "20% wrong labels"), (task, WRONG_LABELS)} <= told("EMA", 1)
    assert not {where for where in told("EMA", 1) if where[0] == "textures"}
    sharp = [points("SAM, rho 0.3", *where)[1:] for where in SHARP]
    assert "`rho=0.3` gains {} and {} on glosses, and loses {} on digits with 40% and {} on".format(*sharp) in EVIDENCE
    assert {*SHARP[:2]} <= told("SAM, rho 0.3", 1)
    assert {*SHARP[2:]} <= told("SAM, rho 0.3", -1)
    assert card_says("SAM", "if training is long: 0.3 gained on glosses and in 60 epochs on digits, and lost in 15")
    longer = result("sam_digits")["noisy labels"]
    assert longer["SAM"]["rho"] == 0.3
    mine, plain, equal = (f"{100 * longer[name]['test_mean']:.1f}" for name in ("SAM", "SGD", "SGD at equal compute"))
    said = f"a test accuracy of {mine}%, more than anything here; plain training has {plain}%, and {equal}% in the time"
    assert said in EVIDENCE
    rows = [row for row in result("quality")["rows"] if (row["task"], row["regime"]) == ("digits", WRONG_LABELS)]
    assert float(mine) > max(row["mean"] for row in rows)


SHARP = [("glosses", "20% wrong labels"), ("glosses", WRONG_LABELS)]
SHARP += [("digits", WRONG_LABELS), ("textures", "20% wrong labels")]


def test_what_the_evidence_page_says_of_the_language_model() -> None:
    tricks = ("ScheduleFree", "flat_cos", "EMA")
    assert all(("text", "clean") in told(trick, 1) for trick in (*tricks, "plain, twice the epochs"))
    *lower, longer = (float(points(trick, "text")) / 100 for trick in (*tricks, "plain, twice the epochs"))
    assert "lower its loss by {:.2f}, {:.2f} and {:.2f} nats".format(*lower) in EVIDENCE
    assert f"Twice the epochs lower it by {longer:.2f}." in EVIDENCE
    assert f"fell by {min(lower):.2f} to {max(lower):.2f} nats" in GUIDE
    assert f"and by {longer:.2f} with twice the epochs" in GUIDE
    few = ("text", "10% of the samples")
    measured = [trick for trick in gains() if few in gains()[trick]]
    lower_there = [trick for trick in measured if few in told(trick, 1)]
    assert "plain, half the epochs" in lower_there
    assert len(lower_there) > 0.7 * len(measured)


def at_size(name: str, trick: str, regime: str | None = None) -> dict[str, Any]:
    """The row of a trick in a benchmark of larger networks."""
    (row,) = (row for row in result(name)["rows"] if (row["trick"], row.get("regime")) == (trick, regime))
    return row


def at_best(trick: str) -> dict[str, Any]:
    """The row of a trick of the larger language model at the best of its rates, by validation."""
    losses: dict[str, list[float]] = {}
    for run in result("language_model")["runs"]:
        if run["part"] == "finals" and re.fullmatch(rf"{re.escape(trick)}(, \d+ times the rate)?", run["trick"]):
            losses.setdefault(run["trick"], []).append(run["val_loss"])
    return at_size("language_model", min(losses, key=lambda name: sum(losses[name])))


def nats(trick: str) -> str:
    """By how much the loss of the larger language model is lower."""
    row = at_best(trick)
    assert row["gain"]["low"] > 0
    return f"{row['gain']['points'] / 100:.2f}"


def interval(row: dict[str, Any]) -> tuple[float, str]:
    """A gain and its interval."""
    return row["gain"]["points"], f"{row['gain']['low']:+.1f} to {row['gain']['high']:+.1f}"


def test_what_the_pages_say_of_larger_networks() -> None:
    text = " ".join(README.split())
    rows = [at_size("finetune", trick, WRONG_LABELS) for trick in ("EMA", "SWA")]
    assert all(row["gain"]["low"] > 0 for row in rows)
    told = "gains {:.1f} points of test accuracy by `EMA` (95% interval {}) and {:.1f} by `SWA` ({})"
    assert told.format(*interval(rows[0]), *interval(rows[1])) in text
    twice = at_size("finetune", "plain, twice the steps", WRONG_LABELS)
    assert "; twice the steps gain {:.1f} ({}).".format(*interval(twice)) in text
    assert f"with 40% wrong labels [`SWA`](tricks/SWA.md) gained {rows[1]['gain']['points']:.1f} points |" in GUIDE
    found = [nats(trick) for trick in ("EMA", "flat_cos", "ScheduleFree")]
    assert (
        "its loss, in nats per byte, is {} lower with `EMA`, {} with `flat_cos`, {} with `ScheduleFree`".format(*found)
        in text
    )
    assert f", {nats('cosine, Muon')} with [Muon](docs/optimizers.md#muon) beside a cosine in" in text
    best = "cosine, Muon", "cosine, SOAP"
    times = [f"{at_best(trick)['over_plain']:.1f}" for trick in best]
    longer = nats("plain, twice the steps")
    assert f"in {times[0]} times the time (AdamW for twice the steps: {longer})" in text
    (lower,) = {*map(nats, best)}
    assert f"by {lower} nats, in {' and '.join(times)} times the time" in GUIDE
    least, *_, most = sorted(map(nats, ("PostHocEMA", "flat_cos", "EMA")))
    free = f"[`ScheduleFree`](tricks/ScheduleFree.md), by {nats('ScheduleFree')} |"
    assert f"or [`EMA`](tricks/EMA.md), by {least} to {most}; {free}" in GUIDE
    rows = [row for row in result("finetune")["rows"] if row["regime"] != WRONG_LABELS]
    longer = {"plain, twice the steps", "soup of three, 3 times the steps"}
    assert not [row for row in rows if row["gain"]["low"] > 0 and row["trick"] not in longer]
    assert "With clean labels no trick gains measurably in as many steps. On pictures" in text
    better = [row for row in result("finetune_images")["rows"] if row["gain"]["low"] > 0 and row["trick"] not in longer]
    assert [row["trick"] for row in better] == ["ScheduleFree"]
    pictures = at_size("finetune_images", "plain, twice the steps", "Other fonts in the test")
    told = "On pictures `ScheduleFree` gains {:.1f} ({}) in a short training, and twice the steps {:.1f} ({})."
    assert told.format(*interval(better[0]), *interval(pictures)) in text
    soup = "soup of three, 3 times the steps"
    soups = at_size("finetune", soup, WRONG_LABELS), at_size("finetune_images", soup, "Other fonts in the test")
    wrong, on, plain, images = (f"{row['gain']['points']:.1f}" for row in (soups[0], soups[1], twice, pictures))
    told = (
        f"gained {wrong} points with 40% wrong labels, where plain training gained {plain} in twice the steps, and {on}"
    )
    assert card_says("average_checkpoints", f"{told} on pictures, where it gained {images}.")
    settings = result("finetune")["settings"]
    few, all_of = (settings["regimes"][regime] for regime in ("10% of the samples", "clean"))
    assert few["steps"] == 3 * all_of["steps"]
    assert all_of["steps"] * settings["batch"] < settings["training samples"]["clean"] / 10
    assert (
        "tenth of the definitions training takes three times the steps, and of all of them it sees less than a"
        in EVIDENCE
    )
    rows = [row for name in ("finetune", "finetune_images") for row in result(name)["rows"]]
    assert not [
        row for row in rows if row["trick"] in ("layer decay 0.8", "GradualUnfreeze") and row["gain"]["low"] > 0
    ]
    page = " ".join((ROOT / "docs" / "transfer.md").read_text().split())
    assert "layer decay of 0.8 and gradual unfreezing showed no gain; LoRA of rank 4 showed no loss, in" in page
    names = ", 0.3 times the rate", ", linear, 0.3 times the rate"
    wide, falling = (at_size("finetune", f"LoRA, r 16{of}", "clean") for of in names)
    assert wide["gain"]["high"] < 0 < falling["gain"]["points"]
    others = [at_size("finetune", f"LoRA, r 16{of}", "clean") for of in ("", ", 0.1 times the rate")]
    assert all(row["gain"]["points"] < wide["gain"]["points"] for row in others)
    lost = f"of rank 16 it lost {-wide['gain']['points']:.1f} points with clean labels at the best of three constant"
    assert f"{lost} rates, and none at one that falls linearly" in page
    plain, *lora = (at_size("finetune", *each) for each in (("plain", "clean"), *(("LoRA, r 4", of) for of in REGIMES)))
    assert all(row["gain"]["low"] < 0 < row["gain"]["high"] for row in lora)
    time, peaks = lora[0]["over_plain"], (lora[0]["peak_mib"], plain["peak_mib"])
    assert "in {:.1f} times the time and with {:.0f} MiB at the peak in place of {:.0f}".format(time, *peaks) in page
    assert peaks[0] < peaks[1] / 2
    assert "the first two showed no gain, LoRA took less than half of the memory, and with 40% wrong labels" in GUIDE
    page = " ".join((ROOT / "docs" / "optimizers.md").read_text().split())
    mine, soap, plain, cosine, both = (
        f"{at_best(trick)['mean'] / 100:.2f}" for trick in (*best, "plain", "cosine", "cosine, both rates")
    )
    assert soap in (mine, f"{float(mine) - 0.01:.2f}")
    assert f"has a loss of {mine} nats per byte with Muon and as much with SOAP, both beside a cosine" in page
    assert f"and {plain} with AdamW at a constant rate" in page
    assert f"the difference: beside a cosine AdamW has {cosine} without it and {both} with it" in page
    cells: dict[tuple[float, int], dict[str, float]] = {}
    for sweep in result("gain_scaling")["sweep"]:
        cells.setdefault((sweep["share"], sweep["width"]), {})[sweep["trick"]] = sweep["lr"]
    assert all(of["cosine, Muon"] == pytest.approx(10 * of["plain"]) for of in cells.values())
    assert "the rate that short training chose for Muon was ten times that of AdamW without a schedule" in page
    muon = [row for row in result("gain_scaling")["rows"] if row["trick"] == "cosine, Muon"]
    small, *_, large = sorted(muon, key=lambda row: row["weights"])
    few = min(muon, key=lambda row: row["sequences"])
    first, last, worst = (row["gain"]["points"] / 100 for row in (small, large, few))
    assert (
        f"from {first:.2f} to {last:.2f} nats with {large['weights'] / small['weights']:.0f} times the weights" in page
    )
    again = [row for row in result("gain_scaling")["rows"] if row["trick"].startswith("cosine, Muon, ")]
    less = max((row["gain"] for row in again if row["sequences"] == few["sequences"]), key=lambda gain: gain["points"])
    assert less["low"] < 0 < less["high"]
    told = f"it is {-worst:.2f} worse at that rate, and neither better nor worse at smaller ones"
    assert f"on {few['sequences']} sequences, each drawn sixteen times, {told}" in page
    assert few["steps"] * result("gain_scaling")["settings"]["batch"] // few["sequences"] == 16
    assert at_best("plain")["lr"] == pytest.approx(3 * at_size("language_model", "plain")["lr"])
    budget = result("language_model")["settings"]["budget"]
    assert budget["steps"] / budget["sweep_steps"] == pytest.approx(4, rel=0.01)
    assert card_says("find_lr", "better at three times the rate that runs of a quarter of its length had chosen")


REGIMES = ("clean", WRONG_LABELS)
BOTH = ("Muon, both rates", "AdamW, both rates")


def test_what_the_evidence_page_says_of_muon() -> None:
    assert counts("Muon") == (8, 1, 27)
    page = " ".join((ROOT / "docs" / "optimizers.md").read_text().split())
    assert "is better than plain training in 8 of 27 settings, and worse in 1 ([evidence]" in page
    assert (
        "**Muon**, at one learning rate for all weights, is better than plain training in 8 of 27 settings" in EVIDENCE
    )
    clean = [settings["digits", "clean"]["points"] for settings in gains().values() if ("digits", "clean") in settings]
    assert max(clean) == gains()["Muon"]["digits", "clean"]["points"]
    assert f"It gains {points('Muon', 'digits')[1:]} points on clean digits, more than anything else there" in EVIDENCE
    assert not [where for where in told("Muon", 1) if where[0] == "glosses"]
    assert ("text", "clean") in told("Muon", 1)
    lower = float(points("Muon", "text")) / 100
    assert (
        f"lowers the loss of the language model by {lower:.2f} nats, and gains nothing measurable on glosses"
        in EVIDENCE
    )
    mine, control = (
        [points(trick, "glosses", regime)[1:] for regime in (WRONG_LABELS, "10% of the samples")] for trick in BOTH
    )
    assert "Muon gains {} points with 40% wrong labels and {} with a tenth of the samples.".format(*mine) in EVIDENCE
    assert "But so does AdamW with the same two: {} and {}.".format(*control) in EVIDENCE


def test_what_the_evidence_page_says_of_few_samples_rare_classes_and_shifts() -> None:
    found = {
        (task, regime): {trick for trick in gains() if (task, regime) in told(trick, 1)}
        for task in ("digits", "textures", "glosses")
        for regime in ("10% of the samples", "long tail")
    }
    few, tail = "10% of the samples", "long tail"
    others = {"HiddenMixup", "label smoothing 0.1", "AutoClip", *BOTH}  # "and a second rate"
    assert found["glosses", few] - {"plain, twice the epochs"} == others
    for trick, text in (("HiddenMixup", "`HiddenMixup` ({})"), ("label smoothing 0.1", "label smoothing ({})")):
        assert text.format(points(trick, "glosses", few)) in EVIDENCE
    clip, muon, sharp = points("AutoClip", "glosses", few), points("Muon", "digits", few), "SAM, rho 0.3"
    assert f"`AutoClip` ({clip}) and a second rate gain, on digits `SAM`" in EVIDENCE
    best = points(sharp, "digits", few)
    assert f"`SAM` with `rho=0.3` ({best}) and Muon ({muon}); all other gains on images are less than a" in EVIDENCE
    images = [
        (gains()[trick][task, few]["points"], trick) for task in ("digits", "textures") for trick in found[task, few]
    ]
    (most, first), (less, second), (least, _), *_ = sorted(images, reverse=True)
    assert (first, second) == (sharp, "Muon")
    assert least < 1  # "less than a point"
    assert f"`SAM(0.3)` gained {most:.1f} points and Muon {less:.1f} on our digits, and all else less than 1" in GUIDE
    assert [found[task, tail] for task in ("digits", "textures", "glosses")] == [
        {"label smoothing 0.1"},
        set(),
        {"LogitAdjustment", *BOTH},
    ]
    assert not [
        trick
        for regime in (few, tail)
        for trick in gains()
        if all(trick in found[task, regime] for task in ("digits", "textures", "glosses"))
    ]
    rows = dict(re.findall(r"^\|(Rare classes|Few samples)\|(.*)\|$", README, re.MULTILINE))
    assert "[no trick helps on all tasks]" in rows["Few samples"]
    assert "lt.LogitAdjustment()" in rows["Rare classes"]
    adjusted, weighted = points("LogitAdjustment", "glosses", tail)[1:], points("class weights", "digits", tail)[1:]
    assert (
        f"`LogitAdjustment` gains {adjusted} points on glosses and nothing measurable on digits, a second" in EVIDENCE
    )
    assert ("digits", tail) in told("class weights", -1)
    own = "at the learning rate that is tuned for plain training, and nothing measurable at one of their own"
    assert f"Class weights lose {weighted} on digits, {own}" in EVIDENCE
    (trial,) = (row["gain"] for row in result("claims")["rows"] if row["trick"] == "class weights")
    assert trial["low"] < 0 < trial["high"]
    inconclusive = gains()["class weights"]["glosses", tail]
    few = "their {points:.1f} on glosses are inconclusive ({low:+.1f} to {high:+.1f})"
    assert few.format(**inconclusive) in EVIDENCE
    assert inconclusive["low"] < 0
    assert counts("balanced sampling")[:2] == (0, 0)
    assert f"which gained {adjusted} points on our glosses and nothing measurable on digits and textures |" in GUIDE
    losses = " ".join((ROOT / "docs" / "losses.md").read_text().split())
    assert f"it gained {adjusted} points on our glosses and nothing measurable on textures and digits. On" in losses
    assert f"On digits class weights lost {weighted} at the same learning rate, and nothing measurable at one" in losses
    (second,) = {points(trick, "glosses", tail)[1:] for trick in BOTH}
    smoothed = points("label smoothing 0.1", "digits", tail)[1:]
    assert f"a second rate gains {second} on glosses, label smoothing {smoothed} on digits." in EVIDENCE
    for trick, task, shift, text in (
        ("EMA", "digits", "noise", "`EMA` gains {} with noise"),
        ("EMA", "digits", "rotation", "and {} with rotation on digits"),
        ("EMA", "glosses", "noise", "and {} with noise on glosses"),
        ("SAM, rho 0.3", "textures", "rotation", "On rotated textures `SAM` with `rho=0.3` gains {} and"),
        ("ProgressiveResizing", "textures", "rotation", "and `ProgressiveResizing` {}."),
        ("SAM", "digits", "blur", "`SAM` loses {} on blurred digits"),
        ("Lion", "digits", "blur", "and Lion {}."),
    ):
        sign = -1 if trick in ("SAM", "Lion") else 1
        assert (task, shift) in told(trick, sign)
        assert text.format(points(trick, task, shift)[1:]) in EVIDENCE


def test_what_the_evidence_page_says_of_calibration_compute_and_harm() -> None:
    assert ("digits", WRONG_LABELS) in told("EMA", -1, "ece_gain")
    assert f"by {points('EMA', 'digits', WRONG_LABELS, 'ece_gain')[1:]} points with 40%" in EVIDENCE
    assert ("glosses", WRONG_LABELS) in told("EMA", 1, "ece_gain")
    for trick in ("label smoothing 0.1", "CutMix"):
        images = [where for where in gains()[trick] if where[0] in ("digits", "textures")]
        assert len(told(trick, -1, "ece_gain") & {*images}) > len(images) / 2
    for trick, better, worse, of in (
        ("plain, twice the epochs", 8, 2, 27),
        ("SAM, half the epochs", 1, 16, 27),
        ("HardExampleFilter", 0, 9, 22),
        ("CutMix", 0, 9, 16),
        ("Lion", 4, 9, 27),
        ("AutoClip", 2, 3, 27),
        ("AdaptiveClip", 1, 4, 27),
        ("QAT int4", 0, 0, 19),
        ("Mixup", 1, 3, 16),
        ("LayerFreezing", 5, 2, 16),
    ):
        assert counts(trick) == (better, worse, of)
    assert better_and_worse("SAM", "plain, twice the epochs") == (4, 7)
    lost = [-gains()["rounded to int4"][each]["points"] for each in sorted(told("rounded to int4", -1))]
    assert "loses {:.1f} and {:.1f} points on text".format(*sorted(lost)) in EVIDENCE
    for name in ("HardExampleFilter", LOSS):
        wrong = {where for where in gains()[name] if "wrong" in where[1]}
        assert wrong <= told(name, -1)
    lost = [-gains()[name]["digits", "long tail"]["points"] for name in ("HardExampleFilter", LOSS)]
    assert f"with a long tail of digits it loses {lost[0]:.1f}" in EVIDENCE
    assert card_says("HardExampleFilter", f"on digits with a long tail it lost {lost[0]:.1f} points at half the rate")
    assert f"is {lost[0]:.1f} points worse on one of them" in GUIDE
    assert "`HardExampleFilter` can be far worse" in README


def test_three_tricks_are_more_often_worse_than_better_than_one() -> None:
    assert better_and_worse(ALL, "EMA") == (4, 5)
    for page in (EVIDENCE, GUIDE, " ".join(README.split()), " ".join((ROOT / "docs" / "faq.md").read_text().split())):
        assert re.search("in 4 of 27 settings,? and worse in 5", page)
    assert better_and_worse("SAM", "EMA")[0] == 0  # "gained no more with rho=0.05"


def test_on_clean_labels_little_is_better() -> None:
    clean = {
        (trick, task): gain["points"]
        for trick, settings in gains().items()
        for (task, regime), gain in settings.items()
        if regime == "clean" and task != "text" and gain["low"] > 0
    }
    (trick, task), most = max(clean.items(), key=lambda each: each[1])
    assert f"at most {most:.1f} points on our full training sets" in README
    assert f"at most {most:.1f} points of accuracy (`{trick}` on {task})" in EVIDENCE
    assert f"is {most:.1f} points of accuracy ([`{trick}`, on {task}]" in GUIDE
    assert f"gained more than {most:.1f} points" in " ".join(
        line.lstrip("# ") for line in (ROOT / "configs" / "recipes" / "image_scratch.yaml").read_text().splitlines()
    )
    ema = {task: points("EMA", task)[1:] for task in ("digits", "glosses")}
    assert (
        f"`EMA` gains {ema['digits']} on digits and {ema['glosses']} on glosses, and nothing measurable on textures"
        in EVIDENCE
    )
    longer = points("plain, twice the epochs", "digits")[1:]
    assert ("digits", "clean") in told("plain, twice the epochs", 1)
    assert f"Twice the epochs gain {longer} on digits" in EVIDENCE


def test_the_costs_are_those_that_were_measured() -> None:
    added = {row["what"]: row["median"] for row in result("together")["rows"] if row["case"] == "added to a step, tiny"}
    assert all(added[name] < 100 for name in ("EMA", "SWA", "LRSchedule", "SkipNonFinite", "RewindOnSpike", "AutoClip"))
    more = [added[name] / 1000 for name in ("AdaptiveClip", "Mixup")]
    assert "`AdaptiveClip` {:.2f} ms and `Mixup` {:.2f} ms.".format(*more) in COSTS
    (real,) = (
        row["over_floor"]
        for row in result("together")["rows"]
        if row["case"] == "step, ViT-tiny" and row["what"] == "ALL"
    )
    assert f"all callbacks together add {real - 1:.0%}." in COSTS
    times = {
        (row["case"], row["what"]): row for name in ("sam", "hard_examples", "ema") for row in result(name)["rows"]
    }
    sam = times["step over a plain one, resnet50", "lightning_tricks SAM"]["over_floor"]
    left = times["step, resnet18", "HardExampleFilter(0.5, score_scale=0.5)"]["over_floor"]
    assert f"`SAM` takes {sam:.2f} times" in COSTS
    assert f"`score_scale=0.5` {left:.2f} of" in COSTS
    ours, theirs = (
        times["update, resnet50", what]["median"] / 1000
        for what in ("lightning_tricks EMA", "Lightning EMAWeightAveraging")
    )
    assert f"takes {ours:.1f} ms for a ResNet-50; Lightning's takes {theirs:.1f} ms" in COSTS
    lines = {
        (row["case"].removeprefix("line by "), row["what"]): row["median"] for row in result("step_scaling")["rows"]
    }
    half = "half of its 95% interval"
    assert f"exponent {lines['parameters', 'slope']:.2f} ± {lines['parameters', half]:.2f})" in " ".join(COSTS.split())
    assert f"adds {lines['callbacks', 'slope']:.0f} ± {lines['callbacks', half]:.0f} µs" in COSTS
    assert f"({lines['ranks', 'slope'] / 1000:.1f} ± {lines['ranks', half] / 1000:.1f} ms a process)" in COSTS


def card_says(name: str, text: str) -> bool:
    return text in " ".join(card(name).split())


def test_what_the_prose_of_the_cards_says_of_our_tasks() -> None:
    lost = [-gains()["CutMix"]["digits", regime]["points"] for regime in ("long tail", WRONG_LABELS)]
    assert card_says("CutMix", "`CutMix` lost {:.1f} and {:.1f} points on digits".format(*lost))
    assert {("digits", "long tail"), ("digits", WRONG_LABELS)} <= told("CutMix", -1)
    wrong = {trick: {task for task, regime in told(trick, 1) if regime == WRONG_LABELS} for trick in gains()}
    assert card_says("SAM", "with 40% wrong labels both gain on two of our three tasks, `EMA` more and in half")
    assert wrong["EMA"] == wrong["SAM"] == {"digits", "glosses"}
    for task in wrong["EMA"]:
        assert gains()["EMA"][task, WRONG_LABELS]["points"] > gains()["SAM"][task, WRONG_LABELS]["points"]
    assert card_says("flat_cos", "with 40% it gains on three of our four tasks, and loses on none")
    assert len(wrong["flat_cos"]) == 3
    assert not told("flat_cos", -1)
    assert card_says("HardExampleFilter", "It loses on all of our tasks with 40% of them")  # shown above
    assert card_says("AutoClip", "of our 27 settings `AutoClip` gained in 2 and lost in 3, `AdaptiveClip` in 1 and 4")
    snr = {(row["prediction"], row["min_snr"]): row for row in result("diffusion")["rows"]}
    assert card_says("min_snr_weight", "epsilon or v: it did not help in our test")
    assert all(snr[kind, True]["seeds_better"] < 3 for kind in ("epsilon", "v"))
    reached = {row["variant"]: row["reached"] for row in result("inputs")["rows"] if row["task"] == "textures"}
    assert card_says("ProgressiveResizing", 'in our test `mode="crop"` did better')
    assert reached['ProgressiveResizing(0.5, mode="crop")'] > reached["ProgressiveResizing(0.5)"]


# -- the demo ---------------------------------------------------------------------------------------------------------


def figure(variant: str) -> str:
    """Mean and (population) standard deviation of the test accuracy over the seeds, as the demo prints them."""
    found = json.loads((RESULTS / "digits" / "results.json").read_text())["runs"][variant]
    values = [run["test_accuracy"] for run in found]
    assert len(values) == 15
    return f"{statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}"


def test_three_tricks_are_no_better_than_one_in_the_demo_either() -> None:
    assert f"plain training has a test accuracy of {figure('plain')}, `EMA` {figure('EMA')}" in GUIDE
    assert f"and all three {figure(ALL)}." in GUIDE
    assert float(figure("plain")[:5]) < float(figure(ALL)[:5]) <= float(figure("EMA")[:5])
    (lr,) = {each["lr"] for each in result("quality")["runs"] if place_of(each) == ("digits", WRONG_LABELS, "plain")}
    assert lr == LR
    assert f"in the {EPOCHS} epochs of digits" in GUIDE
    small, large = (points(trick, "digits", WRONG_LABELS) for trick in ("SAM", "SAM, rho 0.3"))
    assert f"it gains {small[1:]} points in the 15 epochs of digits with 40% wrong labels, and with 0.3" in GUIDE
    assert f"it loses {large[1:]}." in GUIDE
    assert lt.SAM().rho == 0.05


def place_of(run: dict[str, Any]) -> tuple[str, ...]:
    """Of a final run; those that choose the learning rate have none."""
    return (run["task"], run["regime"], run["trick"]) if run["part"] == "finals" else ()


# -- code and form ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", blocks("python"))
def test_the_code_runs(code: str, tmp_path: Path) -> None:
    run_alone(run_code, code, tmp_path)


def run_code(code: str, folder: Path) -> None:
    """The code as a script, in a folder of its own."""
    os.chdir(folder)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: row.names[0])
def test_the_line_of_a_trick_is_right(row: Row) -> None:
    """A callback can be made, a command is parsed, the rest compiles."""
    match row.line.split():
        case ["lightning-tricks", *arguments]:
            parser().parse_args(arguments)
        case ["return", *_]:
            compile(f"def configure_optimizers(self, optimizer):\n    {row.line}", row.line, "exec")
        case _ if row.line.startswith("callbacks="):
            eval(f"dict({row.line})", {"lt": lt, "teacher": nn.Linear(8, 2)})
        case _:
            compile(row.line, row.line, "exec")
    used = set(re.findall(r"\blt\.(\w+)", row.line))
    assert used & {*row.names} or not used


def test_badges_and_extras_are_those_of_the_package() -> None:
    package = metadata("lightning-tricks")
    required = re.findall(r"^(torch|lightning)\b.*?(>=[\d.]+)", "\n".join(package.get_all("Requires-Dist", [])), re.M)
    badges = dict(re.findall(r">(\w+)</text><text [^>]*>(.*?)</text>", (ROOT / "docs" / "badges.svg").read_text()))
    assert badges.pop("license") == package["License-Expression"]
    least = {name: ">=" + version.removesuffix("+") for name, version in badges.items()}
    assert least == {"python": package["Requires-Python"], **dict(required)}
    table = README.split("|extra|for|")[1].split("\n\n")[0]
    others = {"pytorch-lightning", "notebooks", "bench", "pretrained", "docs", "pages", "test", "dev"}
    assert set(re.findall(r"`([\w-]+)`", table)) == set(package.get_all("Provides-Extra", [])) - others


def test_the_first_screen_has_a_promise_a_number_a_curve_a_line_to_install_and_links() -> None:
    screen, _ = README.split("## Choose by problem")
    assert len(screen.splitlines()) <= 40
    assert len(re.findall(r"\d+\.\d points", screen)) == 1
    assert blocks("diff")[0] in screen
    assert blocks("bash")[0] == f'pip install "lightning-tricks{SOURCE}"\n'
    for where in ("#choose-by-problem", "docs/tricks/README.md", "notebooks/1_quick_start.ipynb", "CHANGELOG.md"):
        assert f'href="{where}"' in screen
    owner, name = REPOSITORY.removeprefix("https://github.com/").split("/")
    assert f'href="https://{owner}.github.io/{name}/"' in screen


def test_the_curve_is_that_of_the_runs_of_the_evidence() -> None:
    curves = result("ema_curve")["runs"]
    ends = {name: [100 * run[-1] for run in seeds] for name, seeds in curves.items()}
    told = "{:.0f}% and between {:.0f}% and {:.0f}%"
    plain, ema = (told.format(statistics.fmean(each), min(each), max(each)) for each in ends.values())
    assert f"of fifteen runs each: plain training ends at {plain}, with EMA at {ema}" in README
    for name, trick in (("plain training", "plain"), ("with EMA", "EMA")):
        committed = [100 * run["test_accuracy"] for run in runs("digits", WRONG_LABELS, trick).values()]
        assert ends[name] == pytest.approx(committed, abs=0.5)  # processors round otherwise
        assert {len(run) for run in curves[name]} == {EPOCHS}


def test_it_fits_one_screen_after_the_other() -> None:
    assert len(README.splitlines()) <= 140
    assert all(len(line) <= 95 for code in blocks(r"\w+") for line in code.splitlines())  # 815 pixels on GitHub
    for line in re.findall(r"^\|.*\|$", README, re.MULTILINE):
        assert len(re.sub(r"\]\(.*?\)|[`*\[]", "", line)) <= 110, f"a table wider than the page: {line}"


# -- errors -----------------------------------------------------------------------------------------------------------


def test_the_messages_of_the_troubleshooting_page_are_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Errors of others")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 20
    written = {text for path in (ROOT / "lightning_tricks").rglob("*.py") for text in literals(path.read_text())}
    assert not [message for message in messages if not any(message in text for text in written)]


def literals(code: str) -> list[str]:
    """The strings of a source file, without what f-strings fill in."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found
