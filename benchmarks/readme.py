"""The tables of README.md, made from the catalogue and the committed figures.

``make tables`` runs it, and writes the tables of ``benchmarks/README.md`` and docs/compatibility.md as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import clients
import conflicts
import matrix
import optimizer_table
import quality_report
from run import discovered
from tables import grid, placed, renew

from lightning_tricks_cli.catalogue import Row
from lightning_tricks_cli.runs.tricks import catalogue

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = "benchmarks/results"
TASKS = ("digits", "textures", "glosses")
ALL = "SAM + EMA + flat_cos"


def tables() -> dict[str, str]:
    """Each table by its name."""
    return {"tricks": tricks()}


def tricks() -> str:
    """What each trick does and costs, and the points that it gains on each task."""
    lines = []
    for row in catalogue():
        names = ", ".join(f"`{name}`" for name in row.names)
        lines.append([names, f"`{row.line}`", row.what, cost(row), *(gains(row, task) for task in TASKS)])
    head = ["trick", "one line of yours", "what it does", "cost", *(f"{task} ¹" for task in TASKS)]
    return grid(head, [*lines, ["all three", "the diff above", ALL, "", *(points(ALL, task) for task in TASKS)]])


def gains(row: Row, task: str) -> str:
    """The points of the tricks of a row that were measured."""
    tricks = {each["trick"].split(",")[0]: each["trick"] for each in reversed(result("quality")["rows"])}
    told = {name: points(tricks[name], task) for name in row.names if name in tricks}
    return "; ".join((f"`{name}` " if len(row.names) > 1 else "") + text for name, text in told.items() if text)


def points(trick: str, task: str) -> str:
    """The difference to plain training, in bold where its interval leaves out 0."""
    told = {(each["trick"], each["setting"]): _told(each["over_plain"]) for each in result("quality")["rows"]}
    return told.get((trick, f"{task}, noisy labels"), "")


def _told(difference: dict[str, float]) -> str:
    text = f"{difference['points']:+.1f}"
    return f"**{text}**" if difference["low"] > 0 or difference["high"] < 0 else text


def cost(row: Row) -> str:
    """What the catalogue says, with the figure that was measured."""
    measure = MEASURED.get(row.names[0])
    return ", ".join(filter(None, (row.cost, measure and measure())))


def guards() -> str:
    """The dearest of the guards on a network that is not tiny, of a pass of clipping."""
    names = ("SkipNonFinite", "TerminateOnNonFinite", "RewindOnSpike")
    rows = result("guards")["rows"]
    most = max(row["over_floor"] for row in rows if row["what"] in names and row["case"] != "step, tiny")
    return link(f"{most:.1f} clipping passes a step", "guards")


def hard_examples() -> str:
    """What is left of a step of a ResNet-18."""
    what = "HardExampleFilter(0.5, score_scale=0.5)"
    (left,) = (row["over_floor"] for row in result("hard_examples")["rows"] if row["what"] == what)
    return link(f"{left:.2f} of a step", "hard_examples")


def estimate() -> str:
    """The largest error of an estimate."""
    error = max(abs(row["over_floor"] - 1) for row in result("memory")["rows"])
    return link(f"within {error:.1%} of measured bytes", "memory")


MEASURED = {"SkipNonFinite": guards, "HardExampleFilter": hard_examples, "estimate_memory": estimate}


def link(text: str, name: str) -> str:
    """A link to the figures."""
    return f"[{text}]({RESULTS}/{name}.json)"


def result(name: str) -> dict[str, Any]:
    """The figures of a benchmark."""
    found: dict[str, Any] = json.loads((ROOT / RESULTS / f"{name}.json").read_text())
    return found


def renewed(text: str) -> str:
    """A README with the tables between their markers."""
    for name, table in tables().items():
        text = placed(text, f"<!-- {name}: make tables -->", table, f"<!-- end of {name} -->")
    return text


if __name__ == "__main__":
    clients.PAGE.write_text(clients.page())
    conflicts.PAGE.write_text(conflicts.page())
    optimizer_table.PAGE.write_text(optimizer_table.page())
    matrix.PAGE.write_text(matrix.page())
    renew(list(discovered()))
    quality_report.renew(result("quality"))
    README.write_text(renewed(README.read_text()))
