"""Output for the user: settings as in the user's code, the table of active tricks, progress bars."""

from __future__ import annotations

import inspect
import math
import shutil
import sys
import textwrap
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_only

Row = tuple[str, Mapping[str, Any]]  # the name of a trick and its settings

_LENGTHS = ("anneal", "cooldown", "flat", "milestones", "start", "warmup")  # settings of curves, in steps


def settings(thing: object, always: tuple[str, ...] = (), given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The first argument of an object, and all that differ from their defaults, by name.

    Args:
        thing: An object that stores its arguments under their own names.
        always: Names of arguments to include also at their default.
        given: The arguments by name, of an object that stores them otherwise.

    Example:
        >>> from lightning.pytorch.callbacks import LearningRateMonitor
        >>> settings(LearningRateMonitor(log_momentum=True))
        {'logging_interval': None, 'log_momentum': True}
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(type(thing)).parameters.items()}
    if given is None:
        given = {name: getattr(thing, name, default) for name, default in defaults.items()}
    return {
        name: value
        for place, (name, value) in enumerate(given.items())
        if place == 0 or name in always or name not in defaults or value != defaults[name]
    }


def described(thing: object, given: Mapping[str, Any] | None = None) -> str:
    """An object as in its user's code.

    Args:
        thing: The object.
        given: Its arguments, as for ``settings``.

    >>> from lightning.pytorch.callbacks import LearningRateMonitor
    >>> described(LearningRateMonitor("step", log_momentum=True))
    "LearningRateMonitor(logging_interval='step', log_momentum=True)"
    """
    written = (f"{name}={value!r}" for name, value in settings(thing, given=given).items())
    return f"{type(thing).__name__}({', '.join(written)})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under the names of their columns; the last column is wrapped to the width of the terminal.

    Lines are longer where the other columns need it.
    """
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return plain_table(columns, rows, shutil.get_terminal_size().columns)
    # No colours, since the text may go to a file. Where stderr has no Unicode, rich draws the lines in ASCII.
    console = Console(file=sys.stderr, color_system=None, force_jupyter=False, width=sys.maxsize)
    drawn, *whole, last = Table(), *zip(columns, *rows, strict=True)
    for column, *cells in whole:  # lines of code are not wrapped, and figures are not cut
        widest = max(console.measure(Text(cell)).maximum for cell in (column, *cells))
        drawn.add_column(column, no_wrap=True, min_width=widest)
    needed = console.measure(drawn).minimum + len("│          ")  # of which 8 are the last column's
    drawn.add_column(last[0], overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    console.width = max(shutil.get_terminal_size().columns, needed)
    with console.capture() as text:
        console.print(drawn)
    return text.get().rstrip("\n")


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    r"""The same table without rich.

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


class Grid(NamedTuple):
    """A table, with lines of text above and below it.

    Args:
        columns: The names of the columns.
        rows: The cells of each row.
        above: The lines above the table.
        below: The lines below it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    above: Sequence[str] = ()
    below: Sequence[str] = ()


class Tabled:
    """A result that Jupyter shows as a table; a subclass says which."""

    @abstractmethod
    def _grid(self) -> Grid:
        """The table."""

    def _repr_html_(self) -> str:
        grid = self._grid()
        lines = [[_row_of_html("th", grid.columns)], [_row_of_html("td", row) for row in grid.rows]]
        head, body = ("".join(part) for part in lines)
        above, below = ("".join(f"<p>{escape(line)}</p>" for line in part) for part in (grid.above, grid.below))
        return f"{above}<table><thead>{head}</thead><tbody>{body}</tbody></table>{below}"


def _row_of_html(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def active_tricks(rows: Sequence[tuple[str, str]], total_steps: int | None) -> str:
    """The text at the start of a fit: the table of its active tricks."""
    steps = "" if total_steps is None else f", {total_steps} optimizer steps"
    return f"\nActive tricks{steps}\n" + table(("trick", "settings"), rows)


def spelled_rows(rows: Sequence[tuple[Row, Sequence[str]]], total_steps: int | None) -> list[tuple[str, str]]:
    """Rows of text from the names and settings of tricks.

    Args:
        rows: Pairs of a row and the names of its settings that are durations.
        total_steps: The number of optimizer steps of the fit, for durations that are fractions; None if unknown.
    """
    return [
        (
            name,
            _spelled(
                {key: _resolved(value, total_steps) if key in durations else value for key, value in given.items()}
            ),
        )
        for (name, given), durations in rows
    ]


def curve_row(settings: Mapping[str, Any]) -> Row:
    """The name of a curve, and its other settings."""
    return settings["curve"], {name: value for name, value in settings.items() if name != "curve"}


def in_whole_steps(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a curve, with the whole step after each of its lengths in steps."""
    return {name: _whole(value) if name in _LENGTHS else value for name, value in settings.items()}


def _whole(steps: Any) -> Any:
    return [*map(_whole, steps)] if isinstance(steps, Sequence) else math.ceil(steps)


def _resolved(duration: Any, total_steps: int | None) -> Any:
    """The optimizer step at which a fraction of training is reached; other values stay as they are."""
    if isinstance(duration, float) and total_steps is not None:
        return f"{math.ceil(duration * total_steps)} of {total_steps}"
    if isinstance(duration, Sequence) and not isinstance(duration, str):
        return [_resolved(part, total_steps) for part in duration]
    return duration


def _spelled(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in given.items() if value not in (None, (), []))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):  # the settings of a curve inside another one
        name, rest = curve_row(in_whole_steps(value))
        return f"{name} ({_spelled(rest)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def readable(size: float) -> str:
    """Bytes with three digits and a unit.

    >>> readable(0), readable(2_340_000), readable(80e9)
    ('0 B', '2.34 MB', '80 GB')
    """
    power = 0
    while size >= 999.5 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def progress(items: Iterable[Any] | None, what: str, total: int | None = None) -> Any:
    """A progress bar over items, or one to update by hand; removed at its end.

    It is drawn on a terminal, and in a notebook that has ipywidgets, on rank zero only.

    >>> list(progress([1, 2], "counting"))
    [1, 2]
    """
    from tqdm.auto import tqdm

    is_widget = any(kind.__module__ == "tqdm.notebook" for kind in tqdm.__mro__)
    disable = True if getattr(rank_zero_only, "rank", 0) else False if is_widget else None  # None: if no terminal
    return tqdm(items, what, total, leave=False, disable=disable)
