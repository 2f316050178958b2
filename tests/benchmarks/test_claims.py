"""What is worse than plain training was tried as its paper has it, or contradicts no paper."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scipy import stats

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("claims")


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    return found


def test_a_row_that_is_worse_was_tried_as_the_paper_has_it_or_contradicts_no_paper(claims: ModuleType) -> None:
    committed = result("claims")
    trials = {each["trick"]: each for each in committed["trials"]}
    tried = {(each["trick"], each["task"], each["regime"]) for each in committed["rows"]}
    contradicting = 0
    for each in result("quality")["rows"]:
        if each["gain"]["high"] >= 0:
            continue
        name = claims.OF.get(each["trick"], each["trick"])
        if each["task"] in trials.get(name, {"tasks": ()})["tasks"]:
            assert (name, each["task"], each["regime"]) in tried, "python benchmarks/claims.py"
            contradicting += 1
        else:
            assert committed["otherwise"][each["trick"]], "what does the paper say of it?"
    assert contradicting > 20


def test_trials_are_what_the_script_has(claims: ModuleType) -> None:
    committed = result("claims")
    assert committed["otherwise"] == claims.OTHERWISE
    for each in committed["trials"]:
        trial = claims.TRIALS[each["trick"]]
        assert (each["paper"], each["claim"]) == (trial.paper, trial.claim)
        assert (each["tasks"], each["configuration"]) == ([*trial.tasks], trial.configuration)
        assert each["base"] == trial.base
    assert len(committed["trials"]) == len(claims.TRIALS)
    tricks = importlib.import_module("quality").TRICKS
    assert claims.TRIALS.keys() | claims.OTHERWISE.keys() | claims.OF.keys() <= tricks.keys()
    assert committed["settings"] == dict.fromkeys(("seeds", "epochs", "batches")) | {"tunes": True}


def test_gains_are_those_of_runs_with_the_same_seeds(claims: ModuleType) -> None:
    committed = result("claims")
    assert claims.rows(committed["runs"]) == committed["rows"]
    finals = {
        (run["task"], run["regime"], run["trick"], run["seed"]): run
        for run in committed["runs"]
        if run["part"] != "learning rates"
    }
    tasks = importlib.import_module("quality").TASKS
    for row in committed["rows"]:
        assert row["seeds"] == tasks[row["task"]].seeds
        shifted = row["regime"] in ("noise", "blur", "rotation")
        cell, part = (row["task"], "clean" if shifted else row["regime"]), row["regime"] if shifted else "test"
        metric, factor = (f"{part}_loss", -100) if row["task"] == "text" else (f"{part}_accuracy", 100)
        mine, plain = (
            [factor * finals[(*cell, name, seed)][metric] for seed in range(row["seeds"])]
            for name in (row["trick"], claims.TRIALS[row["trick"]].base)
        )
        limits = stats.ttest_rel(mine, plain).confidence_interval(0.95)
        assert [row["gain"]["low"], row["gain"]["high"]] == pytest.approx([*limits], abs=0.01)


def test_the_page_says_what_the_figures_say(claims: ModuleType) -> None:
    assert claims.section(result("claims"), result("quality")) in (BENCHMARKS / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("names", [("ScheduleFree", "Muon"), pytest.param((), marks=pytest.mark.slow)])
def test_every_configuration_trains(
    claims: ModuleType, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names or tuple(claims.TRIALS)
    monkeypatch.setattr(claims, "SCRATCH", tmp_path)
    scale = claims.Scale(2, epochs=1, batches=2, tunes=False)
    made = claims.result([claims.trial("digits", "clean", names, scale)], scale)
    found = {each["trick"]: each for each in made["rows"] if each["regime"] == "clean"}
    assert tuple(found) == names
    assert {each["gain"]["points"] for each in found.values()} != {0.0}
    quality = {"rows": [{**each, "gain": {"points": -1.0, "low": -2.0, "high": -0.5}} for each in made["rows"]]}
    assert claims.wanted(quality) == {("digits", "clean"): [*names]}
    assert f"{len(made['rows'])} rows that are worse contradict a paper" in claims.section(made, quality)
