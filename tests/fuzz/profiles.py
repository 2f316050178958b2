"""The settings of all fuzz tests: the same cases in every run, without a clock and without files."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings


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
