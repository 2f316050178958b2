"""The table of docs/optimizers.md, from what ``optimizers()`` says; ``make tables`` writes it."""

from __future__ import annotations

from pathlib import Path

from tables import placed

import lightning_tricks as lt

PAGE = Path(__file__).parent.parent / "docs" / "optimizers.md"
MARKS = ("<!-- optimizers: make tables -->", "<!-- end of optimizers -->")


def markdown() -> str:
    """The table."""
    lines = ["| name | library | extra | bytes a weight | FSDP2 | ZeRO | when |", "|---|---|---|---|---|---|---|"]
    for row in lt.optimizers():
        marks = ["✓" if row[engine] else "refused" for engine in ("fsdp2", "zero")]
        cells = [f"`{row['name']}`", row["library"], row["extra"], f"{row['bytes']:g}", *marks, row["use"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """docs/optimizers.md with the table between its markers."""
    return placed(PAGE.read_text(), MARKS[0], markdown(), MARKS[1])
