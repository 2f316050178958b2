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
from lightning.pytorch.accelerators import Accelerator

from tests.device.python_names import simulated
from tests.device.simulation import Simulation

CUDA = [pytest.param("real cuda", marks=pytest.mark.gpu), "simulated cuda"]
TRAINED_ON = [*CUDA, "simulated mps"]  # of which Lightning has an accelerator
EVERY = [*TRAINED_ON, "simulated xpu"]
LACKS = {  # types of numbers that a device has not
    "cuda": (),
    # All that getMPSDataType of torch (aten/src/ATen/native/mps/OperationUtils.mm) does not know: "Cannot convert a MPS
    # Tensor to float64 dtype as the MPS framework doesn't support float64" and "Trying to convert Float8_e4m3fn to the
    # MPS backend but it does not have support for that dtype".
    "mps": (
        *(torch.float64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint16, torch.uint32, torch.uint64),
    ),
    # A GPU of Intel whose torch.xpu.get_device_capability() has has_fp64 False ("whether float64 dtype is supported").
    "xpu": (torch.float64, torch.complex128),
}


class XPU(Accelerator):
    """As Lightning's documentation has it for a device that Lightning does not know."""

    def setup_device(self, device: torch.device) -> None:
        torch.xpu.set_device(device)

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return [torch.device("xpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.xpu.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.xpu.is_available()

    @staticmethod
    def name() -> str:
        return "xpu"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Device:
    """A device of a test, "cuda", "mps", "xpu", "xla" or "cpu", and the simulation of it."""

    name: str
    simulation: Simulation | None = None

    @property
    def accelerator(self) -> str | Accelerator:
        """What a Trainer is given."""
        return XPU() if self.name == "xpu" else {"xla": "tpu"}.get(self.name, self.name)

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
        settings: Arguments of ``simulated``. What a simulated device lacks is in ``LACKS``, if it is not said.
    """
    sort, name = on.split()
    if sort == "simulated":
        with simulated(name, **{"lacks": LACKS[name], **settings}) as simulation:
            yield Device(name, simulation)
    else:
        yield Device(name)
