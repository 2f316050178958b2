"""Tables in text: by rich if it is installed, else plain."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under the names of their columns; the last column is wrapped to the width of the terminal."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return plain_table(columns, rows, shutil.get_terminal_size().columns)
    drawn = Table()
    for place, column in enumerate(columns):
        drawn.add_column(column, no_wrap=place < len(columns) - 1, overflow="fold")  # a line of code stays whole
    for row in rows:
        drawn.add_row(*map(Text, row))
    # no colours: the text may go to a file; where stderr writes no Unicode, rich draws the lines in ASCII
    console = Console(file=sys.stderr, color_system=None, force_jupyter=False, width=shutil.get_terminal_size().columns)
    with console.capture() as text:
        console.print(drawn)
    return text.get().rstrip("\n")


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
