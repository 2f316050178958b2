"""The tables of ``benchmarks/README.md``, made from the committed figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- costs: written by benchmarks/run.py -->", "<!-- end of costs -->"
HEAD = "|{}|median|min to max|unit|over its floor|floor|\n|---|---|---|---|---|---|"


def markdown(result: dict[str, Any]) -> str:
    """A result's machine, its targets, and a table for each case."""
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    settings = ", ".join(f"{key} {value}" for key, value in result["settings"].items())
    parts = [f"### {result['benchmark']}", f"{machine}. {settings}."]
    for case, rows in groupby(result["rows"], lambda row: row["case"]):
        parts.append("\n".join([HEAD.format(case), *map(_line, rows)]))
    if result["targets"]:
        lines = [f"|{t['what']}|{t['limit']}|{_number(t['measured'])}|{_verdict(t['met'])}|" for t in result["targets"]]
        parts.append("\n".join(["|target|limit|measured||\n|---|---|---|---|", *lines]))
    return "\n\n".join(parts)


def _line(row: dict[str, Any]) -> str:
    if row["median"] is None:
        return f"|{row['what']}|{row['note'].splitlines()[0].replace('|', '/')}|||||"
    limits = "" if row["min"] is None else f"{_number(row['min'])} to {_number(row['max'])}"
    note = f" ({row['note']})" if row["note"] else ""
    over, floor = _number(row["over_floor"]), row["floor"] or ""
    return f"|{row['what']}{note}|{_number(row['median'])}|{limits}|{row['unit']}|{over}|{floor}|"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _verdict(met: bool | None) -> str:
    return {True: "met", False: "missed", None: "not measured"}[met]


def section(names: Sequence[str]) -> str:
    """The tables of all benchmarks."""
    results = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names if _file(name).exists()]
    return "\n\n".join(markdown(result) for result in results)


def _file(name: str) -> Path:
    return RESULTS / f"{name}.json"


def renew(names: Sequence[str]) -> None:
    """Write the tables between their markers."""
    before, rest = README.read_text().split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n\n{section(names)}\n\n{END}{rest.split(END)[1]}")
