"""Rows of figures and the targets that they are judged by: the one format of all benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from timing import Measured

US = {"us": 1.0, "ms": 1e3, "s": 1e6}


class Row(NamedTuple):
    """A contender in a case: median and limits of its rounds, and the median of its ratios to the floor in a round."""

    case: str
    what: str
    unit: str
    median: float | None
    min: float | None = None
    max: float | None = None
    floor: str | None = None
    over_floor: float | None = None
    note: str = ""


def rows_of(case: str, measured: Measured, floor: str | None = None, unit: str = "us", per: float = 1) -> list[Row]:
    """A row for each contender, those that failed included; times are divided by ``per``."""
    lowest = measured.times.get(floor or "")
    found = [
        row(case, what, [time / US[unit] / per for time in times], unit)._replace(
            floor=floor if lowest else None, over_floor=over(times, lowest) if lowest else None
        )
        for what, times in measured.times.items()
    ]
    return found + [Row(case, what, unit, None, note=error) for what, error in measured.failed.items()]


def added_rows(case: str, measured: Measured, plain: str, unit: str = "us") -> list[Row]:
    """What each contender adds to the plain one in the same round."""
    base = measured.times[plain]
    return [
        row(case, what, [(time - own) / US[unit] for time, own in zip(times, base, strict=True)], unit)
        for what, times in measured.times.items()
        if what != plain
    ]


def row(case: str, what: str, values: Sequence[float], unit: str) -> Row:
    """The median and the limits, with four figures."""
    return Row(case, what, unit, *(shortened(each) for each in (median(values), min(values), max(values))))


def over(times: Sequence[float], floor: Sequence[float]) -> float:
    """The median of the ratios within a round: the load of a machine drifts from one round to the next."""
    return shortened(median(time / lowest for time, lowest in zip(times, floor, strict=True)))


def shortened(value: float) -> float:
    """Four figures; more are noise."""
    return float(f"{value:.4g}")


def figure(rows: Sequence[Row], case: str, what: str, name: str = "median") -> float | None:
    """One figure of the row of a contender in a case; None of one that failed."""
    found = [getattr(each, name) for each in rows if (each.case, each.what) == (case, what)]
    assert len(found) <= 1, "a contender has one row in a case"
    return found[0] if found else None


def ratio(first: float | None, second: float | None) -> float | None:
    """Of figures that were measured."""
    return None if first is None or second is None else round(first / second, 3)


def target(what: str, measured: float | None, sign: str, limit: float) -> dict[str, Any]:
    """What was aimed at, and whether it was reached; None where nothing was measured."""
    met = None if measured is None else measured <= limit if sign == "<=" else measured >= limit
    return {"what": what, "limit": f"{sign} {limit}", "measured": measured, "met": met}


def written(result: Mapping[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = []
    for key, value in result.items():
        lines = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f' "{key}": ' + (f"[\n  {lines}\n ]" if lines else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(result: Mapping[str, Any]) -> list[Row]:
    """The rows of a result that was written."""
    return [Row(**each) for each in result["rows"]]
