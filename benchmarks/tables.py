"""Tables in Markdown, and those of ``benchmarks/README.md``, made from the committed figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- costs: written by benchmarks/run.py -->", "<!-- end of costs -->"
VERDICTS = {True: "met", False: "missed", None: "not measured"}
HEAD = ("median", "min to max", "unit", "over its floor", "floor")


def grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"|{'|'.join(line)}|" for line in [head, ["---"] * len(head), *body])


def placed(text: str, begin: str, inside: str, end: str) -> str:
    """The text with something else between its markers."""
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{inside.strip()}\n\n{end}{rest.split(end)[1]}"


def markdown(result: dict[str, Any]) -> str:
    """A result's machine, its targets, and a table for each case."""
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    settings = ", ".join(f"{key} {value}" for key, value in result["settings"].items())
    parts = [f"### {result['benchmark']}", f"{machine}. {settings}."]
    for case, rows in groupby(result["rows"], lambda row: row["case"]):
        parts.append(grid([case, *HEAD], map(_line, rows)))
    if result["targets"]:
        lines = [(t["what"], t["limit"], _number(t["measured"]), VERDICTS[t["met"]]) for t in result["targets"]]
        parts.append(grid(["target", "limit", "measured", ""], lines))
    return "\n\n".join(parts)


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    if row["median"] is None:
        return row["what"], row["note"].splitlines()[0].replace("|", "/"), "", "", "", ""
    limits = "" if row["min"] is None else f"{_number(row['min'])} to {_number(row['max'])}"
    note = f" ({row['note']})" if row["note"] else ""
    over, floor = _number(row["over_floor"]), row["floor"] or ""
    return row["what"] + note, _number(row["median"]), limits, row["unit"], over, floor


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def section(names: Sequence[str]) -> str:
    """The tables of all benchmarks."""
    return "\n\n".join(markdown(json.loads((RESULTS / f"{name}.json").read_text())) for name in names)


def renew(names: Sequence[str]) -> None:
    """Write the tables between their markers."""
    README.write_text(placed(README.read_text(), BEGIN, section(names), END))
