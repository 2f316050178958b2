"""Some values of a parameter stand for all of them in ``make test``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], count: int) -> list[Any]:
    """All values of a parameter, of which so many, spread over them, are quick, and the others slow."""
    values = list(values)
    quick = {round(number * (len(values) - 1) / max(count - 1, 1)) for number in range(count)}
    return [value if number in quick else slow(value) for number, value in enumerate(values)]


def slow(value: Any) -> Any:
    """The value of one or several parameters, marked as slow."""
    if not isinstance(value, type(pytest.param())):
        value = pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)
    return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
