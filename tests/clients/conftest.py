"""``pytest tests/clients/test_timm.py --clients FILE`` writes what each trick did in the models of a project.

Without that option nothing is collected here: the projects are not installed where the other tests run.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients", type=Path, help="write what was found in the models of a project to this file")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if config.getoption("clients", default=None) else True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "trick(name): the cell of the table that a test finds")
    if path := config.getoption("clients"):
        config.pluginmanager.register(Cells(path))


class Cells:
    """Collects what the tests found, by model and trick."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, dict[str, str]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        mark = item.get_closest_marker("trick")
        if mark is not None and (call.when == "call" or not report.passed):
            cells = self.found.setdefault(item.cls.model, {})  # type: ignore[attr-defined]
            (name,) = mark.args
            assert name not in cells, f"{name} is found by two tests"
            cells[name] = cell(report, call)
        return report

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")


def cell(report: pytest.TestReport, call: pytest.CallInfo[Any]) -> dict[str, str]:
    """What a test found.

    "right", "refused", "none" (no meaning), "late" (refused after a step), "wrong" without a word, or a raw "error".
    """
    if report.passed:
        return {"cell": "right"}
    assert call.excinfo is not None
    if report.skipped and not hasattr(report, "wasxfail"):
        kind, _, why = str(call.excinfo.value).partition(": ")
        return {"cell": kind, "why": why}
    if getattr(report, "wasxfail", "").startswith("late: "):
        return {"cell": "late", "why": report.wasxfail.removeprefix("late: ")}
    why = getattr(report, "wasxfail", "") or str(call.excinfo.value).strip().split("\n")[0]
    return {"cell": "wrong" if call.excinfo.errisinstance(AssertionError) else "error", "why": why}
