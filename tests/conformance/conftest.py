"""``pytest tests/conformance tests/device --matrix FILE`` writes the compatibility matrix, as passed tests found it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.matrix import Cell, Memory, Waits, as_json, empty, write


@pytest.fixture
def cell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """What a test calls at its end: ``cell("EMA", "fp32")`` for right, ``cell("SAM", "DeepSpeed", "refused", why)``."""

    def found(row: str, regime: str, what: str = "right", why: str = "") -> None:
        record_property("cell", [row, regime, what, why])

    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", type=Path, help="write the compatibility matrix to this file; fail at an empty cell")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("matrix") is not None and not hasattr(config, "workerinput"):  # which xdist's workers have
        config.pluginmanager.register(Matrix(config.getoption("matrix")))


class Matrix:
    """Collects the cells of all workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: list[tuple[Cell, str]] = []
        self.waits: list[tuple[Waits, str]] = []
        self.memory: list[tuple[Memory, str]] = []
        self.problem = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for name, found in (("cell", self.cells), ("waits", self.waits), ("memory", self.memory)):
                found += [(tuple(value), report.nodeid) for known, value in report.user_properties if known == name]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        try:
            matrix = as_json(self.cells, self.waits, self.memory)
            if missing := empty(matrix):
                raise ValueError(f"{len(missing)} cells are empty: " + ", ".join(missing))
            write(matrix, self.path)
        except ValueError as error:
            self.problem = str(error)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.problem:
            terminalreporter.section("compatibility matrix", red=True)
            terminalreporter.line(f"{self.path} is not written. {self.problem}")
