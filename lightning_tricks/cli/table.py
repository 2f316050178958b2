"""Tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tricks.core.table import table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under the names of their columns."""
    print(table(columns, rows))
