"""The settings of all fuzz tests: the same cases in every run, without a clock and without files."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st


def drawn(strategy: st.SearchStrategy[Any], number: int, part: int) -> list[Any]:
    """So many values, other ones for each part, and the same in every process."""
    found: list[Any] = []

    @seed(part)
    @cases(6 * number, print_blob=False)
    @given(value=strategy)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found[::6]  # the five behind each are mostly like it


def modules(number: int) -> int:
    """So many modules of a slow case, or as many as FUZZ_MODULES says."""
    return int(os.environ.get("FUZZ_MODULES", number))


def cases(number: int, **more: Any) -> settings:
    """So many cases."""
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )
