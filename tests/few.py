"""Some values of a parameter, or some cases of a test, stand for all of them in ``make test``.

``@pytest.mark.few(6)`` says so of the cases of a test, ``few(values, 6)`` of the values of one of its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], count: int) -> list[Any]:
    """All values of a parameter, of which so many, spread over them, are quick, and the others slow."""
    values = list(values)
    quick = spread(len(values), count)
    return [value if number in quick else slow(value) for number, value in enumerate(values)]


def spread(size: int, count: int) -> set[int]:
    """So many numbers below a size, spread over them."""
    return {round(number * (size - 1) / max(count - 1, 1)) for number in range(count)}


def keep_few(items: Iterable[pytest.Item]) -> None:
    """Mark cases of tests as slow, but for as many as ``@pytest.mark.few`` says, of those that are not slow anyway."""
    cases = defaultdict[tuple[Any, str], list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.path, getattr(item, "originalname", item.name)].append(item)
    for those in cases.values():
        quick = spread(len(those), those[0].get_closest_marker("few").args[0])  # type: ignore[union-attr]
        for number, item in enumerate(those):
            if number not in quick:
                item.add_marker(pytest.mark.slow)


def slow(value: Any) -> Any:
    """The value of one or several parameters, marked as slow."""
    if not isinstance(value, type(pytest.param())):
        value = pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)
    return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
