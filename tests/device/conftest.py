"""What the simulated device tells the compatibility matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def waits(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """What a test calls at its end: ``waits("EMA", 0, 1, "")`` for none in a step, and one in a step that logs."""

    def found(row: str, step: int, logged: int, why: str) -> None:
        record_property("waits", [row, step, logged, why])

    return found
