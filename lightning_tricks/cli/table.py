"""Tables in a terminal: by rich if it is installed, else plain."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under the names of their columns; the last column is wrapped to the width of the terminal."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain_table(columns, rows, shutil.get_terminal_size().columns))
        return
    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=place < len(columns) - 1)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    r"""The same without rich.

    >>> print(plain_table(["name", "when"], [["ddp", "several devices"], ["single", "one"]], width=16))
    name    when
    ddp     several
            devices
    single  one
    """
    every = [columns, *rows]
    widths = [max(len(row[place]) for row in every) for place in range(len(columns) - 1)]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for row in every:
        start = "".join(f"{cell:<{wide + 2}}" for cell, wide in zip(row, widths, strict=False))
        wrapped = [textwrap.wrap(line, max(8, width - indent)) for line in row[-1].splitlines()]
        last = [line for lines in wrapped for line in lines] or [""]
        lines += [(start + last[0]).rstrip(), *(" " * indent + line for line in last[1:])]
    return "\n".join(lines)
