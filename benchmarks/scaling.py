"""How a cost grows: lines through measured points with the interval of their slopes, and the picture of them.

``python benchmarks/run.py step_scaling`` measures the points and draws ``results/step_scaling.svg``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from lightning_tricks.evaluation.statistics import student_t

NAME = "step_scaling"


class Line(NamedTuple):
    """``y = start + slope * x`` by least squares; ``half`` is half the 95% interval of the slope (Student's t)."""

    start: float
    slope: float
    half: float
    explained: float  # the share of the variance of y


def line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line through three points or more.

    >>> line([1, 2, 3, 4], [3, 5, 7, 9])
    Line(start=1.0, slope=2.0, half=0.0, explained=1.0)
    """
    middle, level = mean(xs), mean(ys)
    spread = sum((x - middle) ** 2 for x in xs)
    slope = sum((x - middle) * (y - level) for x, y in zip(xs, ys, strict=True)) / spread
    start = level - slope * middle
    rest = sum((y - start - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    total = sum((y - level) ** 2 for y in ys)
    half = student_t(len(xs) - 2) * (rest / (len(xs) - 2) / spread) ** 0.5
    return Line(start, slope, half, 1 - rest / total if total else 1.0)


def points(result: dict[str, Any], case: str) -> tuple[list[float], list[dict[str, Any]]]:
    """The measured rows of a case with the number that begins the name of each."""
    rows = [row for row in result["rows"] if row["case"] == case and row["median"] is not None]
    return [float(row["what"].split()[0].replace(",", "")) for row in rows], rows


def draw(folder: Path) -> None:
    """One panel a case, with its line."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = NAME  # the same bytes for the same figures
    from cost.step_scaling import PARAMETERS, UNITS
    from matplotlib import pyplot

    result = json.loads((folder / f"{NAME}.json").read_text())
    figure, axes = pyplot.subplots(1, len(UNITS), figsize=(4 * len(UNITS), 3.4), layout="constrained")
    for axis, (case, unit) in zip(axes, UNITS.items(), strict=True):
        xs, rows = points(result, case)
        ys = [row["median"] for row in rows]
        limits = [
            [max(0.0, y - row["min"]) for y, row in zip(ys, rows, strict=True)],
            [r["max"] - r["median"] for r in rows],
        ]
        axis.errorbar(xs, ys, yerr=limits, fmt="o", color="#1f77b4", capsize=2, lw=1)
        if case == PARAMETERS:
            axis.set_xscale("log")
            axis.set_yscale("log")
        elif len(xs) > 2:
            fitted = line(xs, ys)
            axis.plot(xs, [fitted.start + fitted.slope * x for x in xs], color="#bbbbbb")
        axis.set_title(case, fontsize=9)
        axis.set_xlabel(unit, fontsize=9)
        axis.set_ylabel("us added to a step", fontsize=9)
    figure.savefig(folder / f"{NAME}.svg", metadata={"Date": None})
    pyplot.close(figure)
