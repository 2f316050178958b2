"""benchmarks/inputs.py: a run's course, and what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import inputs


@pytest.mark.parametrize(("name", "variant"), [("textures", "ProgressiveResizing(0.5)"), ("glosses", "plain")])
def test_a_course_counts_what_training_was_given(name: str, variant: str) -> None:
    task = inputs.TASKS[name]._replace(epochs=1)
    run = inputs.fitted(task, task.load(0.0), task.variants.get(variant), seed=0)
    seconds, millions, accuracies = zip(*run.points, strict=True)
    assert list(seconds) == sorted(seconds)
    assert seconds[0] > 0
    sides = (16, 20, 24, 28, 32, 32) if variant != "plain" else ()  # of 6 steps, at 4.8 of which images are full
    words = 16 * 64 * 2000 // 64 / 1e6
    assert millions[-1] == pytest.approx(sum(32 * side**2 for side in sides) / 1e6 if sides else words, rel=0.02)
    assert all(0 <= accuracy <= 1 for accuracy in (*accuracies, run.accuracy))


def test_what_is_reached_is_reached_first() -> None:
    run = inputs.Ended([(1.0, 10.0, 0.5), (2.0, 20.0, 0.8), (3.0, 30.0, 0.7), (4.0, 40.0, 0.9)], 0.85)
    slow = inputs.Ended([(1.0, 20.0, 0.5), (2.0, 40.0, 0.7), (3.0, 60.0, 0.6), (8.0, 80.0, 0.9)], 0.8)
    assert run.to(0.75) == (2.0, 20.0)
    assert run.to(0.95) is None
    plain, ours = inputs.compared("textures", inputs.TASKS["textures"], {"plain": [slow, slow], "faster": [run, slow]})
    assert plain["target"] == 0.89
    assert ours["reached"] == "2 of 2"
    assert ours["seconds_over_plain"] == [0.75, 0.5, 1.0]
    assert ours["inputs_over_plain"] == [0.75, 0.5, 1.0]
    assert (ours["test_accuracy"], ours["seeds_better"]) == (0.825, 1)


def test_the_committed_figures_are_of_these_variants() -> None:
    rows = json.loads(inputs.OUTPUT.read_text())["rows"]
    variants = [(name, each) for name, task in inputs.TASKS.items() for each in (inputs.PLAIN, *task.variants)]
    assert [(row["task"], row["variant"]) for row in rows] == variants
