"""What every public name does and costs, and where the tests show that it is correct."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import lightning_tricks as lt
from lightning_tricks_cli.catalogue import CATALOGUE, Row

KINDS = (
    *("advisor", "callbacks", "checkpoints", "evaluation", "losses", "modules", "optimizers", "schedules"),
    "strategies",
)
MATRIX = Path(__file__).parents[1] / "matrix.json"


class Trick(NamedTuple):
    """A public name and its description.

    Args:
        name: The public name.
        kind: The sub-package that exports it.
        what: The first line of its docstring.
        line: The line of code to add to a training script.
        cost: Its cost in time and memory.
        works: The regimes in which the tests show that it is correct.
    """

    name: str
    kind: str
    what: str
    line: str
    cost: str
    works: str

    def description(self) -> str:
        """The text for a table, on several lines."""
        cost, works = (self.cost and f"costs: {self.cost}"), (self.works and f"works with: {self.works}")
        return "\n".join(line for line in (self.what, self.line, cost, works) if line)


def public() -> dict[str, str]:
    """Every public name and the sub-package that exports it."""
    packages = {kind: importlib.import_module(f"lightning_tricks.{kind}") for kind in KINDS}
    return {name: kind for kind, package in packages.items() for name in package.__all__}


def catalogue() -> list[Row]:
    """The rows of the catalogue, and a row from the docstring for every other name of the top level."""
    listed = {name for row in CATALOGUE for name in (*row.names, *row.beside)}
    rest = [name for name in lt.__all__ if name not in listed and name != "functional"]
    return [*CATALOGUE, *(Row((name,), "", first_line(getattr(lt, name))) for name in rest)]


def first_line(thing: object) -> str:
    """The first line of a docstring, without code marks."""
    return (thing.__doc__ or "").split("\n")[0].replace("``", "")


def tricks(word: str = "", matrix: Path = MATRIX) -> list[Trick]:
    """List the public names that have a word in their name or description; by default all of them.

    Raises:
        ValueError: If there is none.
    """
    found = []
    for name, kind in public().items():
        what = first_line(getattr(importlib.import_module(f"lightning_tricks.{kind}"), name))
        if word.lower() in f"{name} {what}".lower():
            found.append(Trick(name, kind, what, *_line_and_cost(name), works_with(name, matrix)))
    if not found:
        raise ValueError(f"no trick has {word!r} in its name or description: see lightning-tricks tricks.")
    return found


def _line_and_cost(name: str) -> tuple[str, str]:
    """The catalogue's line of code with the name, and the cost."""
    row = next((row for row in CATALOGUE if name in (*row.names, *row.beside)), Row((name,), "", ""))
    line = row.line if re.search(rf"\b{name}\b", row.line.replace("-", "_")) else ""
    return line, row.cost if name in row.names else ""


def works_with(name: str, matrix: Path = MATRIX) -> str:
    """The regimes in which the conformance suite shows that a trick is correct; empty if it has no row.

    Args:
        name: The name of the trick.
        matrix: The JSON file that ``tests/conformance`` writes.
    """
    cells = json.loads(matrix.read_text())["tricks"].get(name, {}) if matrix.is_file() else {}
    return ", ".join(regime for regime, cell in cells.items() if cell["cell"] == "right")
