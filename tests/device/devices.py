"""A test that runs on a real CUDA device, where there is one, and on a simulated one everywhere::

@pytest.mark.parametrize("on", CUDA)
def test_it(on: str) -> None:
    with device(on) as there:
        x = torch.ones(3, device=there.name)
        with there.waits(at_most=0):
            x.add_(1)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.device.python_names import simulated
from tests.device.simulation import Simulation

CUDA = [pytest.param("real cuda", marks=pytest.mark.gpu), "simulated cuda"]
EVERY = [*CUDA, "simulated mps", "simulated xpu"]


@dataclass(frozen=True)
class Device:
    """A device of a test, "cuda", "mps", "xpu" or "cpu", and the simulation of it."""

    name: str
    simulation: Simulation | None = None

    @contextmanager
    def waits(self, at_most: int) -> Iterator[None]:
        """Raise if the host waits for the device more often inside the block, or reads a copy that has not arrived.

        A real device tells whether there is a wait, and not how many. The CPU has none.
        """
        if self.simulation is not None:
            waits, races = len(self.simulation.waits), len(self.simulation.races)
            yield
            assert len(self.simulation.waits) - waits <= at_most, self.simulation.waits[waits:]
            assert self.simulation.races[races:] == []
        elif at_most or self.name == "cpu":
            yield
        else:
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


CPU = Device("cpu")


def require_devices(number: int) -> None:
    """Skip a test for real devices on a machine with fewer."""
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} CUDA devices")


@contextmanager
def device(on: str, **settings: Any) -> Iterator[Device]:
    """The device of a test, by one of the names of ``CUDA`` or ``EVERY``, or "host cpu".

    Args:
        on: The name.
        settings: Arguments of ``simulated``.
    """
    sort, name = on.split()
    if sort == "simulated":
        with simulated(name, **settings) as simulation:
            yield Device(name, simulation)
    else:
        yield Device(name)
