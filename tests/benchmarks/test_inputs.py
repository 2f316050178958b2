"""benchmarks/inputs.py: a run's course, and what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import inputs


def test_a_course_counts_what_training_was_given() -> None:
    task = inputs.TASKS["textures"]._replace(epochs=1, every=3)
    run = inputs.fitted(task, task.load(0.0), task.variants["ProgressiveResizing(0.5)"], seed=0)
    (first, half, before), (then, full, after) = run.points
    assert 0 < first < then
    sides = (16, 20, 24, 24, 28, 32)  # of six steps, the last full
    assert [half, full] == pytest.approx([sum(32 * side**2 for side in sides[:steps]) / 1e6 for steps in (3, 6)])
    assert all(0 <= accuracy <= 1 for accuracy in (before, after, run.accuracy))


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
