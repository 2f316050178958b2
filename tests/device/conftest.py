"""What the simulated device tells the compatibility matrix and the cards."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def waits(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """What a test calls at its end: ``waits("EMA", 0, 1, "")`` for none in a step, and one in a step that logs."""

    def found(row: str, step: int, logged: int, why: str) -> None:
        record_property("waits", [row, step, logged, why])

    return found


@pytest.fixture
def memory(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """What a test calls at its end: ``memory("EMA", 1.0, 0.0, "the average")``, in multiples of the trained weights."""

    def found(row: str, on_device: float, on_host: float, why: str) -> None:
        record_property("memory", [row, on_device, on_host, why])

    return found
