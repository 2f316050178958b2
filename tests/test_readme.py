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

import lightning_tricks as lt
from lightning_tricks.evaluation.statistics import paired_difference
from lightning_tricks.examples.digits import SharpDigits
from lightning_tricks_cli.cards import card
from lightning_tricks_cli.catalogue import CATALOGUE, Row
from lightning_tricks_cli.main import parser
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
IMAGES = ("digits, 40% wrong labels", "textures, 40% wrong labels")
WRONG = (*IMAGES, "glosses, 40% wrong labels")
WRONG_LABELS = "40% wrong labels"
ALL = "SAM + EMA + flat_cos"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def better() -> dict[str, set[str]]:
    """The settings of the five seeds in which a trick is significantly better than plain training."""
    return {trick: {each for each, gain in settings.items() if gain["low"] > 0} for trick, settings in five().items()}


def worse() -> dict[str, set[str]]:
    return {trick: {each for each, gain in settings.items() if gain["high"] < 0} for trick, settings in five().items()}


def five() -> dict[str, dict[str, dict[str, float]]]:
    """Of each trick the difference from plain training by setting, with five seeds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in result("quality")["rows"]:
        if not row["trick"].startswith("plain"):
            found.setdefault(row["trick"], {})[row["setting"].replace("noisy", "40% wrong")] = row["over_plain"]
    return found


def regimes(metric: str = "gain") -> dict[str, dict[tuple[str, str], dict[str, float]]]:
    """Of each trick the difference from plain training, by task and regime."""
    found: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for row in result("regimes")["rows"]:
        if row["trick"] != "plain":
            found.setdefault(row["trick"], {})[row["task"], row["regime"]] = row[metric]
    return found


def told(trick: str, sign: int, metric: str = "gain") -> set[tuple[str, str]]:
    """Where the intervals tell a trick to be better (1) or worse (-1)."""
    rows = regimes(metric)[trick].items()
    return {where for where, gain in rows if (gain["low"] > 0) - (gain["high"] < 0) == sign}


def points(trick: str, task: str, regime: str = "clean", metric: str = "gain") -> str:
    """A gain as pages have it."""
    return f"{regimes(metric)[trick][task, regime]['points']:+.1f}"


# -- the gain of one line ---------------------------------------------------------------------------------------------


def test_the_gain_of_the_average_is_that_of_all_fifteen_seeds() -> None:
    gain = regimes()["EMA"]["digits", WRONG_LABELS]
    interval = f"{gain['low']:+.1f} to {gain['high']:+.1f}"
    text = " ".join(README.split())
    assert f"it adds {gain['points']:.1f} points of test accuracy (95% interval {interval}, 15 seeds)" in text
    flat = regimes()["flat_cos"]["digits", WRONG_LABELS]
    spread = f"(five seeds, {flat['low']:+.1f} to {flat['high']:+.1f})"
    assert f"gains {flat['points']:.1f} there, but not significantly {spread}" in text
    assert flat["low"] < 0 < flat["high"]
    assert {row["seeds"] for row in result("regimes")["rows"] if (row["task"], row["trick"]) == ("digits", "EMA")} == {
        15
    }
    assert f"has {gain['points']:.1f} points for `EMA`" in " ".join((ROOT / "docs" / "faq.md").read_text().split())
    *_, row = result("five_seeds")["rows"]
    assert len(row["seeds"]) == 15
    another = f"{row['points']:+.1f} ({row['low']:+.1f} to {row['high']:+.1f})"
    assert f"[Another 15 seeds](results/five_seeds.json) on digits have {another}" in EVIDENCE
    assert f"+{row['points']:.1f} of all 15" in (ROOT / "docs" / "compare.md").read_text()
    clean = [points("EMA", task) for task in ("digits", "textures", "glosses")]
    assert f"there is less to gain: {clean[0]}, {clean[1]} and {clean[2]} on" in text


# -- claims about all tasks -------------------------------------------------------------------------------------------


def test_what_the_evidence_page_says_of_the_regimes() -> None:
    for task in ("digits", "textures", "glosses"):
        assert (task, WRONG_LABELS) in told("EMA", 1)
        assert points("EMA", task, WRONG_LABELS) in EVIDENCE.split("**Clean labels")[0]
    both = {(task, WRONG_LABELS) for task in ("textures", "glosses")}
    assert all(both <= told(trick, 1) for trick in ("SWA", "SAM", "flat_cos", "one_cycle"))
    for trick in ("SWA", "flat_cos"):  # which the README names after EMA
        for setting in both:
            assert regimes()[trick][setting]["points"] > regimes()["SAM"][setting]["points"]
    assert (
        f"`EMA` gains {points('EMA', 'digits')[1:]} on digits and {points('EMA', 'glosses')[1:]} on glosses" in EVIDENCE
    )
    assert {("digits", "clean"), ("glosses", "clean")} <= told("EMA", 1)
    assert ("textures", "clean") not in told("EMA", 1)
    lower = [float(points(trick, "text")) / 100 for trick in ("ScheduleFree", "flat_cos", "EMA")]
    assert "lower its loss by {:.2f}, {:.2f} and {:.2f} nats".format(*lower) in EVIDENCE
    assert f"fell by {min(lower):.2f} to {max(lower):.2f} nats" in GUIDE
    few, tail = (
        {trick for trick in regimes() for _, where in told(trick, 1) if where == regime}
        for regime in ("10% of the samples", "long tail")
    )
    assert few == {"HiddenMixup", "label smoothing 0.1"}
    assert not tail
    assert f"`HiddenMixup` on glosses ({points('HiddenMixup', 'glosses', '10% of the samples')})" in EVIDENCE
    for trick, task, regime, text in (
        ("EMA", "digits", "noise", "`EMA` gains {} with noise"),
        ("EMA", "digits", "rotation", "and {} with rotation on digits"),
        ("ProgressiveResizing", "textures", "rotation", "`ProgressiveResizing` gains {}"),
        ("AdaptiveClip", "textures", "rotation", "and `AdaptiveClip` {}"),
        ("SAM", "digits", "blur", "`SAM` loses {} on blurred digits"),
    ):
        assert (task, regime) in told(trick, -1 if "loses" in text else 1)
        assert text.format(points(trick, task, regime)[1:]) in EVIDENCE
    assert {("digits", WRONG_LABELS), ("digits", "20% wrong labels")} <= told("EMA", -1, "ece_gain")
    assert f"by {points('EMA', 'digits', WRONG_LABELS, 'ece_gain')[1:]} points with 40%" in EVIDENCE
    for trick in ("label smoothing 0.1", "CutMix"):
        images = [where for where in regimes()[trick] if where[0] in ("digits", "textures")]
        assert len(told(trick, -1, "ece_gain") & {*images}) > len(images) / 2
    for trick, bad, of in (("Lion", 5, 10), ("CutMix", 5, 13), ("SAM, half the epochs", 6, 18)):
        assert (len(told(trick, -1)), len(regimes()[trick])) == (bad, of)
    assert {trick for trick in regimes() if not told(trick, 1) | told(trick, -1)} == {
        *("LayerFreezing", "QAT int8", "BlurPool"),
    }


def test_on_clean_labels_little_is_better_and_the_filter_is_worse() -> None:
    clean = {
        (trick, task): gain["points"]
        for trick, settings in regimes().items()
        for (task, regime), gain in settings.items()
        if regime == "clean" and task != "text" and gain["low"] > 0
    }
    (trick, _), most = max(clean.items(), key=lambda each: each[1])
    assert f"at most {most:.1f} points on our full training sets" in README
    assert f"at most {most:.1f} points of accuracy" in EVIDENCE
    assert f"is {most:.1f} points of accuracy ([`{trick}`, on text]" in GUIDE
    assert f"gained more than {most:.1f} points" in " ".join(
        line.lstrip("# ") for line in (ROOT / "configs" / "recipes" / "image_scratch.yaml").read_text().splitlines()
    )
    assert all(
        not [setting for setting in settings if "clean" in setting]
        for name, settings in better().items()
        if name != "label smoothing"
    )
    on_clean = {trick for trick, settings in worse().items() if any("clean" in setting for setting in settings)}
    assert on_clean == {"HardExampleFilter, prune", "HardExampleFilter, loss"}
    assert "`HardExampleFilter` can be far worse" in README
    diverged = five()["HardExampleFilter, prune"]["digits, clean labels"]["points"]
    assert f"is {-diverged:.1f} points worse on one of them" in GUIDE
    assert worse()["HardExampleFilter, prune"] == {*WRONG, "digits, clean labels"}
    assert worse()["HardExampleFilter, loss"] == {*WRONG, "digits, clean labels"}


def test_what_gains_with_wrong_labels_in_the_five_seeds() -> None:
    gains = {trick for trick, settings in better().items() if settings >= {*IMAGES}}
    assert gains == {"EMA", "SWA", "SAM", "flat_cos", "one_cycle", ALL}
    assert WRONG[2] not in better()["EMA"]  # "nothing significant on glosses"
    assert f"here `EMA` has {five()['EMA'][IMAGES[0]]['points']:+.1f} on digits" in EVIDENCE
    assert not better()["AutoClip"] | worse()["AutoClip"]


def test_label_smoothing_and_twice_the_epochs() -> None:
    found = {(row["trick"], row["setting"]): row["over_plain"] for row in result("quality")["rows"]}
    smooth = {setting for (trick, setting), each in found.items() if trick == "label smoothing" and each["low"] > 0}
    assert smooth == {"digits, clean labels", "glosses, clean labels"}
    longer = {setting for (trick, setting), each in found.items() if "twice" in trick and each["high"] < 0}
    assert longer == {"digits, noisy labels", "glosses, noisy labels"}


def runs(setting: str, trick: str) -> list[float]:
    """The test accuracies by seed, with the settings that were chosen."""
    row = next(row for row in result("quality")["rows"] if (row["setting"], row["trick"]) == (setting, trick))
    strength = row["strength"]
    plain = next(row for row in result("quality")["rows"] if (row["setting"], row["trick"]) == (setting, "plain"))
    stem = f"{setting} | {trick} | {strength} | lr {plain['strength']} | seed "
    return [run["test"] for run in result("quality")["runs"] for seed in range(5) if run["job"] == f"{stem}{seed}"]


def test_three_tricks_are_not_better_than_one() -> None:
    settings = dict.fromkeys(row["setting"] for row in result("quality")["rows"])
    for setting in settings:
        three, one = (runs(setting, trick) for trick in (ALL, "EMA"))
        assert len(three) == len(one) == 5
        assert paired_difference(three, one).low <= 0
    compute = {row["compute"] for row in result("quality")["rows"] if row["trick"] == ALL}
    assert compute == {2.0}  # "twice the time"
    assert "takes twice the time of `EMA` alone and is not significantly better" in README


def test_the_costs_are_those_that_were_measured() -> None:
    added = {row["what"]: row["median"] for row in result("together")["rows"] if row["case"] == "added to a step, tiny"}
    assert all(added[name] < 100 for name in ("EMA", "SWA", "LRSchedule", "SkipNonFinite", "RewindOnSpike"))
    for name in ("AutoClip", "AdaptiveClip"):
        assert f"{added[name] / 1000:.2f} ms; with a real network" in COSTS
    (real,) = (
        row["over_floor"]
        for row in result("together")["rows"]
        if row["case"] == "step, ViT-tiny" and "EMA" in row["what"]
    )
    assert real <= 1
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


def test_what_guide_and_cards_say_of_little_data_and_of_cutmix() -> None:
    few = {trick for trick in regimes() if ("digits", "10% of the samples") in told(trick, 1)}
    assert few == {"label smoothing 0.1"}
    assert "from scratch no trick gained on our images, and label smoothing did on digits" in GUIDE
    lost = [-regimes()["CutMix"]["digits", regime]["points"] for regime in ("long tail", WRONG_LABELS)]
    assert card_says("CutMix", "`CutMix` lost {:.1f} and {:.1f} points on digits".format(*lost))
    assert {("digits", "long tail"), ("digits", WRONG_LABELS)} <= told("CutMix", -1)


def test_what_the_prose_of_the_cards_says_of_our_tasks() -> None:
    wrong = {trick: {task for task, regime in told(trick, 1) if regime == WRONG_LABELS} for trick in regimes()}
    assert card_says("SAM", "with 40% wrong labels it gains on all of our tasks and `SAM` on two of three")
    assert wrong["EMA"] == {"digits", "textures", "glosses"}
    assert len(wrong["SAM"]) == 2
    assert card_says("flat_cos", "with 40% it gains on two of our three tasks, and loses on none")
    assert len(wrong["flat_cos"]) == 2
    assert not {regime for _, regime in told("flat_cos", -1)} & {WRONG_LABELS}
    assert card_says("HardExampleFilter", "It loses on all of our tasks with wrong labels")  # shown above
    assert card_says("AutoClip", "on our tasks `AutoClip` changed nothing")  # shown above
    snr = {(row["prediction"], row["min_snr"]): row for row in result("diffusion")["rows"]}
    assert card_says("min_snr_weight", "epsilon or v: it did not help in our test")
    assert all(snr[kind, True]["seeds_better"] < 3 for kind in ("epsilon", "v"))
    reached = {row["variant"]: row["reached"] for row in result("inputs")["rows"] if row["task"] == "textures"}
    assert card_says("ProgressiveResizing", 'in our test `mode="crop"` did better')
    assert reached['ProgressiveResizing(0.5, mode="crop")'] > reached["ProgressiveResizing(0.5)"]


# -- the demo ---------------------------------------------------------------------------------------------------------


def figure(folder: str, variant: str, key: str = "test_accuracy") -> str:
    """Mean and (population) standard deviation over the seeds, as the demo prints them."""
    found = json.loads((RESULTS / folder / "results.json").read_text())["runs"][variant]
    values = [run[key] for run in found]
    assert len(values) == 5
    return f"{statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}"


def test_the_null_result_is_the_committed_one() -> None:
    for variant in ("plain", "SAM", ALL):
        assert figure("digits_clean", variant) in GUIDE


def test_the_best_epochs_are_the_committed_ones() -> None:
    found = json.loads((RESULTS / "digits" / "results.json").read_text())["runs"]
    plain, ema, tricks = (
        [statistics.fmean(epoch) for epoch in zip(*(run["val_accuracy"] for run in found[variant]), strict=True)]
        for variant in ("plain", "EMA", ALL)
    )
    for curve in (plain, ema):
        assert f"{max(curve):.3f} at epoch {curve.index(max(curve)) + 1}" in GUIDE
    assert f"{tricks[-1]:.3f} at the end" in GUIDE
    assert f"for {len(plain)} epochs" in " ".join((ROOT / "docs" / "faq.md").read_text().split())


def test_the_radius_is_the_best_on_validation_and_the_default_is_reported() -> None:
    rows = [row for row in result("digits_rho")["rows"] if row["variant"] == ALL]
    assert max(rows, key=lambda row: row["val_accuracy"])["rho"] == SharpDigits.sam.rho
    (default,) = [row["test_accuracy"] for row in rows if row["rho"] == lt.SAM().rho]
    assert f"all three have a test accuracy of {default:.3f}" in GUIDE


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
            eval(f"dict({row.line})", {"lt": lt})
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
    others = {"pytorch-lightning", "notebooks", "bench", "docs", "pages", "test", "dev"}
    assert set(re.findall(r"`([\w-]+)`", table)) == set(package.get_all("Provides-Extra", [])) - others


def test_it_fits_one_screen_after_the_other() -> None:
    assert len(README.splitlines()) <= 100
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
