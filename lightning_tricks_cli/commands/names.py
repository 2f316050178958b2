"""The names that the command knows without importing torch, which takes seconds."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def known_names() -> dict[str, Any]:
    """What ``.ci/names.py`` has written: presets, optimizers, callbacks, arguments of the Trainer."""
    names: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("names.json").read_text())
    return names


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under the names of their columns, the last of which is wrapped to the width of the terminal."""
    widths = [2 + max(len(row[place]) for row in [columns, *rows]) for place in range(len(columns) - 1)]
    space = max(20, shutil.get_terminal_size().columns - sum(widths))
    for row in [columns, *rows]:
        start = "".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False))
        print(start + textwrap.fill(row[-1], space).replace("\n", "\n" + " " * sum(widths)))
