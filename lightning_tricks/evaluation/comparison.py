"""What a comparison over seeds says, and what is inconclusive; apart from compare, which trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from statistics import fmean, median, stdev
from typing import Any, Literal, final

from typing_extensions import override

from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.report import Grid, Tabled
from lightning_tricks.evaluation.plan import finite
from lightning_tricks.evaluation.statistics import Interval, paired_difference

Run = dict[str, Any]  # of one fit: "metrics" by name, "seconds", "epochs", "steps"; or "error" alone
Mode = Literal["max", "min"]
HEAD = ("", "mean ± std", "over {} (95% interval)", "", "time")


@final
class Comparison(Tabled):
    """The result of ``compare``: ``print`` shows the table.

    Args:
        metric: Name of the logged metric.
        mode: "max" if more of the metric is better, "min" if less is.
        seeds: Seeds of the runs.
        runs: Runs by arm, in the order of the seeds. The first arm is the baseline.
        equal: For an arm, the arm that trains the baseline for as long as this one takes.
        notes: What is to be known about the arms, as sentences below the table.

    Attributes:
        baseline: Name of the first arm.

    Example:
        >>> runs = {"plain": [0.80, 0.82, 0.81], "EMA": [0.86, 0.87, 0.88]}
        >>> runs = {name: [{"metrics": {"acc": x}, "seconds": 1.0} for x in found] for name, found in runs.items()}
        >>> print(Comparison("acc", "max", [0, 1, 2], runs))
               mean ± std   over plain (95% interval)           time
        plain  0.81 ± 0.01                                      1.00
        EMA    0.87 ± 0.01  +0.06 (+0.0352 to +0.0848)  better  1.00
        acc, 3 seeds; more is better.
    """

    def __init__(
        self,
        metric: str,
        mode: Mode,
        seeds: Sequence[int],
        runs: Mapping[str, Sequence[Run]],
        equal: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.metric, self.mode, self.seeds = metric, mode, list(seeds)
        self.runs, self.equal, self.notes = dict(runs), dict(equal or {}), list(notes)
        self.baseline = next(iter(runs))

    def values(self, arm: str) -> list[float]:
        """The metric of the arm's runs; NaN of a run that failed."""
        return [float(run.get("metrics", {}).get(self.metric, nan)) for run in self.runs[arm]]

    def difference(self, arm: str, other: str | None = None) -> Interval | None:
        """The mean of the arm's runs minus those of another arm with the same seeds; None if a run of either is lost.

        Args:
            arm: Name of the arm.
            other: Name of the other arm; None for the baseline.
        """
        mine, others = self.values(arm), self.values(other or self.baseline)
        return paired_difference(mine, others) if all(map(isfinite, mine + others)) else None

    def verdict(self, arm: str, other: str | None = None) -> str:
        """The words "better", "worse", "inconclusive", or what became of the runs that are lost."""
        difference = self.difference(arm, other)
        if difference is None:
            return self._lost(arm) or f"{other or self.baseline} {self._lost(other or self.baseline)}"
        sign = difference.sign if self.mode == "max" else -difference.sign
        return {1: "better", -1: "worse", 0: "inconclusive"}[sign]

    def _lost(self, arm: str) -> str:
        """How many runs of an arm have no finite metric, and why."""
        errors = [run["error"] for run in self.runs[arm] if "error" in run]
        diverged = sum(not isfinite(value) for value in self.values(arm)) - len(errors)
        told = [f"diverged in {diverged} of {len(self.seeds)} runs"] if diverged else []
        told += [f"failed in {len(errors)} of {len(self.seeds)} runs: {errors[0]}"] if errors else []
        return ", ".join(told)

    def time(self, arm: str) -> float:
        """How long the arm's fits take, as the median of the ratios to the baseline's with the same seed."""
        pairs = zip(self.runs[arm], self.runs[self.baseline], strict=True)
        ratios = [mine["seconds"] / base["seconds"] for mine, base in pairs if "seconds" in mine and "seconds" in base]
        return median(ratios) if ratios else nan

    @override
    def _grid(self) -> Grid:
        head = [text.format(self.baseline) for text in HEAD] + ["at equal time, over"] * bool(self.equal)
        return Grid(head, [self._line(arm) for arm in self.runs], below=self._sentences())

    def __str__(self) -> str:
        grid = self._grid()
        table = [grid.columns, *grid.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join(line.rstrip() for line in [*lines, *grid.below])

    def _line(self, arm: str) -> list[str]:
        values = [value for value in self.values(arm) if isfinite(value)]
        mean = f"{fmean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "") if values else ""
        told = ["", ""] if arm == self.baseline else [_spelled(self.difference(arm)), self.verdict(arm)]
        time = self.time(arm)
        line = [arm, mean, *told, f"{time:.2f}" if isfinite(time) else ""]
        if not self.equal:
            return line
        other = self.equal.get(arm)
        return [*line, f"{other}: {_spelled(self.difference(arm, other))} {self.verdict(arm, other)}" if other else ""]

    def _sentences(self) -> list[str]:
        better = "more" if self.mode == "max" else "less"
        found = [f"{self.metric}, {len(self.seeds)} seeds; {better} is better."]
        if len(self.runs) > 2:
            found.append(
                f"{len(self.runs) - 1} arms: an interval is that of one comparison, and not corrected for their number."
            )
        return found + self.notes

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the differences of the pairs, their mean and its interval, into the given axes or a figure of its own.

        Raises:
            ImportError: If matplotlib is missing.
        """
        figure, ax = figure_and_axes(ax)
        pairs = [(arm, self.baseline) for arm in self.runs if arm != self.baseline] + list(self.equal.items())
        labels = [arm if other == self.baseline else f"{arm} over {other}" for arm, other in pairs]
        for height, (arm, other) in enumerate(pairs):
            found = self.difference(arm, other)
            if found is None:
                ax.text(0, height, self.verdict(arm, other), va="center")
                continue
            gains = [mine - base for mine, base in zip(self.values(arm), self.values(other), strict=True)]
            ax.plot(gains, [height] * len(gains), ".", color="0.7")
            colour = {"better": "C2", "worse": "C3"}.get(self.verdict(arm, other), "C0")
            ax.errorbar(found.mean, height, xerr=found.mean - found.low, fmt="o", color=colour, capsize=4)
        ax.axvline(0, color="0.5", linewidth=1)
        ax.set(xlabel=f"{self.metric} over {self.baseline}", yticks=range(len(pairs)), ylim=(len(pairs) - 0.5, -0.5))
        ax.set_yticklabels(labels)
        return figure, ax

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; None where a value is not finite."""
        rows = [
            {
                "arm": arm,
                **self._told(arm, self.baseline),
                "time": self.time(arm),
                "equal_time": self._told(arm, self.equal[arm]) if arm in self.equal else None,
            }
            for arm in self.runs
        ]
        found = {"metric": self.metric, "mode": self.mode, "seeds": self.seeds, "notes": self.notes, "rows": rows}
        told: dict[str, Any] = finite({**found, "runs": self.runs})
        return told

    def _told(self, arm: str, other: str) -> dict[str, Any]:
        difference = None if arm == other else self.difference(arm, other)
        verdict = None if arm == other else self.verdict(arm, other)
        return {"over": other, "difference": difference and difference._asdict(), "verdict": verdict}


def _spelled(difference: Interval | None) -> str:
    if difference is None:
        return ""
    return f"{difference.mean:+.3g} ({difference.low:+.3g} to {difference.high:+.3g})"
