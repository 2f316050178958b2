"""``pytest -p tests.device.record --record FILE --slice NAME``: a record that goes on where a run was killed.

It has what became of each test as soon as that is known. A test that has an outcome is left out the next time; one amid
which two processes ended is not begun a third time. ``.ci/gpu.py`` notes benchmarks in the same file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a machine without pytest still has benchmarks
    import pytest

TRIES = 2
FILE = "the file"  # the unit of a file that cannot be loaded
LENGTH = 300  # characters of a reason that are kept


class Record:
    """The JSON file: by the names of the slices, each with where it ran and its units (tests, or a benchmark).

    Args:
        path: The file, which need not exist. One process at a time writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slices: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def write(self) -> None:
        """Replace the file at once, so that whoever is killed leaves a whole one."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.slices, indent=1, ensure_ascii=False) + "\n")
        os.replace(new, self.path)

    def of(self, name: str) -> dict[str, Any]:
        """A slice, which is new if there was none."""
        return self.slices.setdefault(name, {"done": False, "units": {}, "warnings": {}})

    def begin(self, name: str, unit: str) -> None:
        """Note one more try, before whatever may end the process."""
        known = self.of(name)["units"].setdefault(unit, {"tries": 0})
        known["tries"] += 1
        self.write()

    def end(self, name: str, unit: str, outcome: str, why: str = "", seconds: float = 0.0) -> None:
        """Note what became of a unit: passed, failed or skipped, with the reason."""
        known = self.of(name)["units"].setdefault(unit, {"tries": 1})
        known |= {"outcome": outcome, "seconds": round(seconds, 2)} | ({"why": why[:LENGTH]} if why else {})
        self.write()

    def give_up(self, name: str, why: str) -> None:
        """Let units have failed that have been tried often enough, the last time with this end."""
        for unit, known in self.of(name)["units"].items():
            if "outcome" not in known and known["tries"] >= TRIES:
                self.end(name, unit, "failed", f"{TRIES} times without an end, at last {why}")


class Plugin:
    """Notes tests while they run.

    Args:
        record: Where it notes them.
        name: The name of the slice.
        missing: Libraries that are not installed: a test that cannot import one of them counts as skipped.
    """

    def __init__(self, record: Record, name: str, missing: list[str]) -> None:
        self.record, self.name, self.missing = record, name, missing
        self.session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.record.end(self.name, FILE, *self.became(report))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        units = self.record.of(self.name)["units"]
        known = [item for item in items if "outcome" in units.get(unit_of(item.nodeid), {})]
        if known:
            config.hook.pytest_deselected(items=known)
            items[:] = [item for item in items if item not in known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.record.begin(self.name, unit_of(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome, why = self.became(report)
            self.record.end(self.name, unit_of(report.nodeid), outcome, why, report.duration)
            if "CUDA error" in why and self.session is not None:  # after which nothing works in this process
                self.session.shouldstop = "the device has to be initialized again, in another process"

    def became(self, report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str]:
        """The outcome and the reason."""
        why = "" if report.passed else reason(report)
        lacks = "ModuleNotFoundError" in why and any(re.search(rf"\b{name}\b", why) for name in self.missing)
        return "skipped" if lacks else report.outcome, why

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        known = self.record.of(self.name)["warnings"]
        text = f"{warning_message.category.__name__}: {warning_message.message}"[:LENGTH]
        known[text] = known.get(text, 0) + 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        known = self.record.of(self.name)
        known["done"] = exitstatus in (0, 1, 5) or FILE in known["units"]  # all passed, some failed, none was left
        self.record.write()


def unit_of(nodeid: str) -> str:
    """The name of a test without that of its file."""
    return nodeid.partition("::")[2] or nodeid


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why it failed or was skipped, in a line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(report.longrepr).strip().splitlines() or ["no reason"]
    return " ".join((crash.message if crash else lines[-1].removeprefix("E ")).split())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="the JSON file")
    parser.addoption("--slice", help="the name of these tests in it")
    parser.addoption("--missing", nargs="*", default=[], help="libraries that are not installed")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record is not None:
        record = Record(config.option.record)
        config.pluginmanager.register(Plugin(record, config.option.slice, config.option.missing))
