"""How costs grow: lines and their intervals, the picture, and what is left out by name. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tricks.evaluation.statistics import student_t
from tests.benchmarks.test_costs import _found, part  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")


def measured(case: str, values: dict[str, float]) -> list[Any]:
    return [part("rows").row(case, what, [value], "us") for what, value in values.items()]


def synthetic() -> list[Any]:
    """Costs that grow as the parameters do, by 5 us a rank, and by 7 us a callback."""
    scaling = part("cost.step_scaling")
    return [
        *measured(scaling.PARAMETERS, {f"{10**n:,} parameters": 2e-4 * 10**n for n in range(5, 9)}),
        *measured(scaling.RANKS, {f"{n} ranks": 100 + 5 * n for n in (1, 2, 4)}),
        *measured(scaling.CALLBACKS, {f"{n} callbacks": 3 + 7 * n for n in (1, 4, 12)}),
    ]


def test_a_line_is_that_of_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(6, dtype=torch.float64)
    y = 2 - 3 * x + torch.randn(6, generator=generator, dtype=torch.float64)
    start, slope, half, explained = part("scaling").line(x.tolist(), y.tolist())
    design = torch.stack([torch.ones_like(x), x], 1)
    naive = torch.linalg.lstsq(design, y[:, None]).solution.flatten()
    torch.testing.assert_close(torch.tensor([start, slope], dtype=torch.float64), naive)
    rest = y - design @ naive
    spread = (rest @ rest / 4 * torch.linalg.inv(design.T @ design)[1, 1]).sqrt()
    assert half == pytest.approx(student_t(4) * float(spread))
    assert explained == pytest.approx(1 - float(rest @ rest / ((y - y.mean()) ** 2).sum()))


def test_slopes_are_those_of_the_points() -> None:
    scaling, rows = part("cost.step_scaling"), part("rows")
    found = scaling.slopes(synthetic())
    slope = {case: rows.figure(found, f"line {case}", scaling.SLOPE) for case in scaling.UNITS}
    assert slope == {scaling.PARAMETERS: 1.0, scaling.RANKS: 5.0, scaling.CALLBACKS: 7.0}
    assert [each["met"] for each in scaling.targets([*synthetic(), *found])] == [True, True]


def test_two_points_have_no_line() -> None:
    scaling = part("cost.step_scaling")
    points = measured(scaling.CALLBACKS, {"1 callbacks": 1.0, "2 callbacks": 2.0})
    assert scaling.slopes(points) == []
    assert [each["met"] for each in scaling.targets(points)] == [None, None]


@pytest.mark.slow
def test_the_picture_has_a_panel_for_each(tmp_path: Path) -> None:
    scaling = part("cost.step_scaling")
    result = {"rows": [row._asdict() for row in synthetic()]}
    (tmp_path / "step_scaling.json").write_text(json.dumps(result))
    part("scaling").draw(tmp_path)
    text = (tmp_path / "step_scaling.svg").read_text()
    assert all(f"<!-- {case} -->" in text for case in scaling.UNITS)
    part("scaling").draw(tmp_path)
    assert (tmp_path / "step_scaling.svg").read_text() == text


def test_sizes_that_need_too_much_memory_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = part("cost.step_scaling")
    monkeypatch.setattr(scaling, "available", lambda device: 10**6)
    monkeypatch.setattr(scaling, "by_callbacks", lambda *_: [])
    rows = scaling.run(part("settings").Settings("tiny"))
    assert [row.note for row in rows if row.what == "1,000,000 parameters"] == ["skipped: memory, it needs 0.02 GB"]
    assert rows[0].median is not None


@pytest.mark.slow
def test_callbacks_are_counted_and_cost_something() -> None:
    scaling = part("cost.step_scaling")
    assert [len(scaling.averages(count)) for count in (1, 12)] == [1, 12]
    (row,) = scaling.by_callbacks([2], 40, 1, "cpu")
    assert (row.case, row.what) == (scaling.CALLBACKS, "2 callbacks")
    assert sum(weight.numel() for weight in scaling.stack(10**5, "cpu").parameters()) == pytest.approx(1e5, rel=0.01)


@pytest.mark.slow
def test_two_ranks_tell_their_times_and_a_failure_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = part("cost.step_scaling")
    row = scaling.by_ranks(2, 1, "cpu")
    assert row.note == ""
    assert row.median is not None
    monkeypatch.setattr(scaling, "SCRIPT", Path("missing.py"))
    assert scaling.by_ranks(1, 1, "cpu").note.startswith("failed: ")
