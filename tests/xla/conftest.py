"""``pytest tests/xla --xla FILE`` writes what each trick did on a device of torch_xla.

Without that option nothing is collected here: torch_xla is not installed where the other tests run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.fabric.accelerators import XLAAccelerator

from tests.device.devices import Device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--xla", type=Path, help="write what the tricks did on a device of torch_xla to this file")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if config.getoption("xla", default=None) else True


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("xla"):
        config.pluginmanager.register(Found(path))


class Found:
    """Collects what the tests that passed have found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.cells |= {name: cell for known, (name, cell) in report.user_properties if known == "xla"}

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.cells))


@pytest.fixture
def cell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """What a test calls at its end: ``cell("EMA")`` for right, ``cell("Float8", "refused", why)``."""

    def found(name: str, what: str = "right", why: str = "") -> None:
        record_property("xla", (name, {"cell": what, **({"why": why} if why else {})}))

    return found


@pytest.fixture(scope="session")
def xla() -> Iterator[Device]:
    """The device, that of the host's CPU unless PJRT_DEVICE says another one.

    Lightning takes an XLA device for one only if it is a TPU. It is told that there is one, and does all else as for a
    TPU: ``accelerator="tpu"`` makes its SingleDeviceXLAStrategy, with its own precision plugin and checkpoints.
    """
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    # Each new graph is compiled; without optimization that takes half of the time.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    import torch_xla

    torch_xla.device()  # before the first backward pass on the CPU, whose threads otherwise do not know the device
    one: Any = {"is_available": staticmethod(lambda: True), "auto_device_count": staticmethod(lambda: 1)}
    with mock.patch.multiple(XLAAccelerator, **({} if XLAAccelerator.is_available() else one)):
        yield Device("xla")
