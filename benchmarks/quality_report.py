"""The figures of ``quality.py``: paired differences with their intervals, and the tables of the README."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

from tables import README, grid, placed

from lightning_tricks.evaluation.statistics import paired_difference

PLAIN = "plain"
BEGIN, END = "<!-- quality: written by benchmarks/quality.py -->", "<!-- end of quality -->"
EQUAL = 0.05  # the share by which compute may differ to be called equal: epochs are whole

Run = dict[str, float]


def figures(setting: str, runs: dict[str, list[Run]], strengths: dict[str, float]) -> list[dict[str, Any]]:
    """A row for every trick of a setting, its runs being sorted by seed; accuracies in per cent."""
    costs = {name: round(work(each) / work(runs[PLAIN]), 3) for name, each in runs.items()}
    return [
        {
            "setting": setting,
            "trick": name,
            "strength": strengths.get(name),
            "test_mean": round(fmean(percent(each)), 2),
            "test_std": round(stdev(percent(each)), 2),
            "compute": costs[name],
            "over_plain": paired(each, runs[PLAIN]),
            "equal": (equal := at_equal_compute(name, costs)),
            "over_equal": None if equal is None else paired(each, runs[equal]),
        }
        for name, each in runs.items()
    ]


def at_equal_compute(name: str, costs: dict[str, float]) -> str | None:
    """The plain training that costs as much; None where there is none, or ``name`` is plain training itself."""
    if name.startswith(PLAIN):
        return None
    near = {other: abs(costs[other] / costs[name] - 1) for other in costs if other.startswith(PLAIN)}
    best = min(near, key=lambda other: near[other])
    return best if near[best] <= EQUAL else None


def paired(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, float]:
    """The mean difference of runs with the same seed, in points, and its 95% interval (Student's t)."""
    found = paired_difference(percent(runs), percent(others))
    return {"points": round(found.mean, 2), "low": round(found.low, 2), "high": round(found.high, 2)}


def percent(runs: Sequence[Run]) -> list[float]:
    """The test accuracies."""
    return [100 * run["test"] for run in runs]


def work(runs: Sequence[Run]) -> float:
    """Forward passes of a sample, a backward pass being as long as two."""
    return sum(run["forward"] + 2 * run["backward"] for run in runs)


def sign(difference: dict[str, float]) -> int:
    """1 and -1 where the interval tells better and worse, 0 where it tells neither."""
    return (difference["low"] > 0) - (difference["high"] < 0)


def renew(result: dict[str, Any]) -> None:
    """Write the tables between their marks."""
    README.write_text(placed(README.read_text(), BEGIN, tables(result), END))


def tables(result: dict[str, Any]) -> str:
    """Machine and settings, one table of all differences, and one of all figures for each setting."""
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    settings = {
        setting: {row["trick"]: row for row in each}
        for setting, each in groupby(result["rows"], lambda row: row["setting"])
    }
    return "\n\n".join([f"{machine}.", summary(settings), *(details(name, each) for name, each in settings.items())])


def summary(settings: dict[str, dict[str, Any]]) -> str:
    """Points over plain training by trick and setting, those that the interval tells in bold."""
    names = dict.fromkeys(name for each in settings.values() for name in each if name != PLAIN)
    plain = [f"{each[PLAIN]['test_mean']:.1f} %" for each in settings.values()]
    body = [
        [name, *(short(each[name]["over_plain"]) if name in each else "" for each in settings.values())]
        for name in names
    ]
    return grid(["points over plain", *settings], [[PLAIN, *plain], *body])


def short(difference: dict[str, float]) -> str:
    text = f"{difference['points']:+.1f}"
    return f"**{text}**" if sign(difference) else text


def details(setting: str, each: dict[str, dict[str, Any]]) -> str:
    """All figures of a setting."""
    header = ["strength", "test accuracy, %", "over plain, points", "compute", "over plain at equal compute"]
    body = [
        [
            name,
            "" if row["strength"] is None else f"{row['strength']:g}",
            f"{row['test_mean']:.2f} ± {row['test_std']:.2f}",
            "" if name == PLAIN else interval(row["over_plain"]),
            f"{row['compute']:.2f}",
            "" if row["equal"] in (None, PLAIN) else interval(row["over_equal"]),
        ]
        for name, row in each.items()
    ]
    return grid([setting, *header], body)


def interval(difference: dict[str, float]) -> str:
    return f"{short(difference)} ({difference['low']:+.1f} to {difference['high']:+.1f})"
