"""Checks of a user's arguments; errors name the argument, the allowed values and the value received."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Sequence

EPOCHS = "Epochs are a fraction: 2 of max_epochs=10 are 2 / 10, in YAML 0.2."
MOST = 2**62  # The largest count; a sum of two of them still fits in torch's int64.


def check_range(name: str, value: float, low: float, high: float = float("inf"), *, below: bool = False) -> None:
    """Raise unless ``low <= value <= high``, or ``low <= value < high`` with ``below``."""
    end = ")" if below or high == float("inf") else "]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number in [{low}, {high}{end}, got {value!r}.")
    if not low <= value <= high or (value == high and end == ")") or abs(value) > sys.float_info.max:
        raise ValueError(f"{name} must be in [{low}, {high}{end}, got {value!r}.")


def check_count(name: str, value: int | None, least: int = 1, *, optional: bool = False) -> None:
    """Raise unless ``value`` is an integer of at least ``least``, or None with ``optional``."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}.")
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value!r}.")


def check_decays(name: str, pair: Sequence[float]) -> None:
    """Raise unless ``pair`` is two numbers in [0, 1)."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise TypeError(f"{name} must be two numbers in [0, 1), got {pair!r}.")
    for place, decay in enumerate(pair):
        check_range(f"{name}[{place}]", decay, 0.0, 1.0, below=True)


def check_bool(name: str, value: bool) -> None:
    """Raise unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raise unless ``value`` is an instance of one of the types."""
    if not isinstance(value, kinds):
        allowed = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be {allowed}, got {value!r}.")


def check_strings(name: str, value: object) -> None:
    """Raise unless ``value`` is a string or a list of strings."""
    if not all(isinstance(item, str) for item in (value if isinstance(value, list | tuple) else [value])):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}.")


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``allowed``; the error suggests the most similar one."""
    if isinstance(value, str) and value in allowed:
        return
    near = difflib.get_close_matches(str(value).lower(), allowed, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")


def check_duration(name: str, value: float) -> None:
    """Raise unless ``value`` is a duration: an int of steps, or a float fraction of training in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name} must be an int (optimizer steps) or a float (fraction of training), got {value!r}. {EPOCHS}"
        )
    if value < 0 or (isinstance(value, float) and not value <= 1):
        raise ValueError(f"{name} must be an int >= 0 (steps) or a float in [0, 1] (fraction), got {value!r}. {EPOCHS}")


def compile_pattern(argument: str, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; the error names the argument."""
    check_type(argument, pattern, str)
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}.") from error


def examples(names: Collection[str]) -> str:
    """Some of the names, for an error message."""
    return f"Parameters are {', '.join(map(repr, [*names][:: len(names) // 5 + 1]))}."


def duration_steps(value: float, total_steps: int) -> float:
    """A duration in steps, not rounded.

    >>> duration_steps(5, total_steps=200), duration_steps(0.5, total_steps=25)
    (5, 12.5)
    """
    return value * total_steps if isinstance(value, float) else value


def some(names: Iterable[str], most: int = 5) -> str:
    """The first names of a list, and the number of the others."""
    listed = list(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
