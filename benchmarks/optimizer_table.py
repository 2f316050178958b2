"""The table of docs/optimizers.md, from ``optimizers()`` and the committed figures; ``make tables`` writes it."""

from __future__ import annotations

import json
from pathlib import Path

from tables import RESULTS, placed

import lightning_tricks as lt

PAGE = Path(__file__).parent.parent / "docs" / "optimizers.md"
MARKS = ("<!-- optimizers: make tables -->", "<!-- end of optimizers -->")
HEAD = ("name", "library", "extra", "bytes a weight", "step", "FSDP2", "ZeRO", "when")


def markdown() -> str:
    """The table; the time of a step is what was measured."""
    figures = json.loads((RESULTS / "optimizers.json").read_text())["rows"]
    ratios = {row["what"]: row["over_floor"] for row in figures if row["floor"]}
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for row in lt.optimizers():
        name = row["name"]
        size = f"{'~' if row['by_shape'] else ''}{row['bytes']:g}"
        marks = ["✓" if row[engine] else "refused" for engine in ("fsdp2", "zero")]
        cells = [f"`{name}`", row["library"], row["extra"], size, f"{ratios[name]:.2g}", *marks, row["use"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """docs/optimizers.md with the table between its markers."""
    return placed(PAGE.read_text(), MARKS[0], markdown(), MARKS[1])
