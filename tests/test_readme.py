"""README, guide and evidence page: their figures are those of the committed runs, their code runs."""

from __future__ import annotations

import ast
import json
import os
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lightning_tricks as lt
from lightning_tricks.evaluation.statistics import paired_difference
from lightning_tricks.examples.digits import SharpDigits
from lightning_tricks_cli.cards import card, evidence
from lightning_tricks_cli.catalogue import CATALOGUE, Row
from lightning_tricks_cli.main import parser
from tests.ranks import run_alone

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = " ".join((ROOT / "docs" / "choose.md").read_text().split())
EVIDENCE = " ".join((ROOT / "benchmarks" / "README.md").read_text().split("<details>")[0].split())
COSTS = " ".join((ROOT / "benchmarks" / "README.md").read_text().split("## What tricks cost")[1].split())
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ("digits, 40% wrong labels", "textures, 40% wrong labels")
WRONG = (*IMAGES, "glosses, 40% wrong labels")
ALL = "SAM + EMA + flat_cos"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def better() -> dict[str, set[str]]:
    """The settings in which a trick is significantly better than plain training."""
    return {trick: {row["setting"] for row in rows if row["low"] > 0} for trick, rows in evidence()["gains"].items()}


def worse() -> dict[str, set[str]]:
    return {trick: {row["setting"] for row in rows if row["high"] < 0} for trick, rows in evidence()["gains"].items()}


# -- the gain of one line ---------------------------------------------------------------------------------------------


def test_the_gain_of_the_average_is_that_of_all_fifteen_seeds() -> None:
    *_, row = result("five_seeds")["rows"]
    assert len(row["seeds"]) == 15
    gain, interval = f"{row['points']:.1f} points", f"{row['low']:+.1f} to {row['high']:+.1f}"
    text = " ".join(README.split())
    assert f"it adds {gain} of test accuracy (95% interval {interval}, 15 seeds)" in text
    assert f"+{gain} on digits ({interval}) with 15 seeds" in EVIDENCE
    assert f"has {gain} for `EMA`" in " ".join((ROOT / "docs" / "faq.md").read_text().split())
    assert f"+{row['points']:.1f} of all 15" in (ROOT / "docs" / "compare.md").read_text()
    clean = {row["task"]: row["gain"]["points"] for row in regimes("clean") if row["trick"] == "EMA"}
    told = [f"{round(clean[task] + 1e-9, 1):+.1f}" for task in ("digits", "textures", "glosses")]
    assert f"there is less to gain: {told[0]}, {told[1]} and {told[2]} on" in text
    assert f"`EMA` is, by {told[0][1:]} and {told[2][1:]} points" in " ".join(EVIDENCE.split())


def regimes(name: str) -> list[dict[str, Any]]:
    """The rows of a regime, of the tasks that have an accuracy."""
    return [row for row in result("regimes")["rows"] if row["regime"] == name and row["task"] != "text"]


# -- claims about all tasks -------------------------------------------------------------------------------------------


def test_on_clean_labels_little_is_better_and_the_filter_is_worse() -> None:
    told = [row for row in regimes("clean") if row["gain"]["low"] > 0]
    most = max(told, key=lambda row: row["gain"]["points"])
    points = f"{most['gain']['points']:.1f} points of accuracy"
    assert f"at most {points}" in README
    assert f"is {points} ([`{most['trick']}`, on text]" in GUIDE
    assert all(not [setting for setting in settings if "clean" in setting] for settings in better().values())
    on_clean = {trick for trick, settings in worse().items() if any("clean" in setting for setting in settings)}
    assert on_clean == {"HardExampleFilter, prune", "HardExampleFilter, loss"}
    assert "In these five seeds no trick is significantly better than plain training" in EVIDENCE
    assert "`HardExampleFilter` can be far worse" in README
    (points,) = (
        row["points"] for row in evidence()["gains"]["HardExampleFilter, prune"] if "digits, cl" in row["setting"]
    )
    assert f"is {-points:.1f} points worse on one of them" in GUIDE
    assert worse()["HardExampleFilter, prune"] == {*WRONG, "digits, clean labels"}
    assert worse()["HardExampleFilter, loss"] == {*WRONG, "digits, clean labels"}


def test_what_gains_with_wrong_labels() -> None:
    gains = {trick for trick, settings in better().items() if settings >= {*IMAGES}}
    assert gains == {"EMA", "SWA", "SAM", "flat_cos", "one_cycle", ALL}
    assert "`EMA`, `SWA`, `SAM`, `flat_cos` and `one_cycle` gain on both tasks" in EVIDENCE
    assert not {trick for trick, settings in better().items() if WRONG[2] in settings}  # "text: nothing gains"
    without = {trick for trick in better() if not better()[trick] | worse()[trick]}
    assert without == {"Mixup", "HiddenMixup", "AutoClip"}
    assert better()["CutMix"] | worse()["CutMix"] == {IMAGES[1]}


def test_label_smoothing_and_twice_the_epochs() -> None:
    told = {(row["trick"], row["setting"]): row["over_plain"] for row in result("quality")["rows"]}
    smooth = {setting for (trick, setting), each in told.items() if trick == "label smoothing" and each["low"] > 0}
    assert smooth == {"digits, clean labels", "glosses, clean labels"}
    longer = {setting for (trick, setting), each in told.items() if "twice" in trick and each["high"] < 0}
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
    assert "takes twice the time of `EMA` alone, and is nowhere significantly better" in README


def test_the_costs_are_those_that_were_measured() -> None:
    added = {row["what"]: row["median"] for row in result("together")["rows"] if row["case"] == "added to a step, tiny"}
    assert all(added[name] < 100 for name in ("EMA", "SWA", "LRSchedule", "SkipNonFinite", "RewindOnSpike"))
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


def card_says(name: str, text: str) -> bool:
    return text in " ".join(card(name).split())


def test_what_the_prose_of_the_cards_says_of_our_tasks() -> None:
    assert card_says("SAM", "on our tasks it gains as much in half the time")
    for setting in ("digits, noisy labels", "textures, noisy labels"):
        difference = paired_difference(runs(setting, "SAM"), runs(setting, "EMA"))
        assert difference.low < 0 < difference.high
    assert card_says("HardExampleFilter", "It loses on all of our tasks with wrong labels")  # shown above
    assert card_says("AutoClip", "on our tasks `AutoClip` changed nothing")
    assert not better()["AutoClip"] | worse()["AutoClip"]
    assert card_says("flat_cos", "it gains on both of our tasks of images")
    assert better()["flat_cos"] == {*IMAGES}
    (row,) = (row for row in evidence()["gains"]["one_cycle"] if row["setting"] == WRONG[2])
    assert card_says("one_cycle", f"it lost {-row['points']:.0f} points there, though the interval includes 0")
    assert row["low"] < 0 < row["high"]
    told = {(row["prediction"], row["min_snr"]): row for row in result("diffusion")["rows"]}
    assert card_says("min_snr_weight", "epsilon or v: it did not help in our test")
    assert all(told[kind, True]["seeds_better"] < 3 for kind in ("epsilon", "v"))
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
