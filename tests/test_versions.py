"""`make test-versions`: what it installs, what it makes of a report, and that it leaves nothing behind."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_tricks.strategies.zero.preset import OLDEST_DEEPSPEED

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "test_versions.py"

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad[1]"><failure message="E">trace</failure></testcase>
<testcase classname="tests.b" name="broken"><error message="E">trace</error></testcase>
<testcase classname="tests.b" name="left out"><skipped message="could not import 'timm'"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(SCRIPT))


def test_a_report_is_counted(script: Any, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    assert script["outcome"](tmp_path / "junit.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests.a::bad[1]", "tests.b::broken"],
        "skips": {"could not import 'timm'": 1},
    }


def test_the_oldest_versions_are_those_that_the_package_allows(script: Any) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert {name: script["oldest"](name) for name in ("lightning", "torch", "timm", "deepspeed")} == {
        "lightning": "2.6.0",
        "torch": "2.9.0",
        "timm": "1.0.21",
        "deepspeed": OLDEST_DEEPSPEED,
    }
    assert all(script["oldest"](name) for name in script["LIBRARIES"])
    assert all(f"!={version}" in project for version in script["COMPROMISED"])
    with pytest.raises(SystemExit, match="no lower limit of pytest"):
        script["oldest"]("pytest")


def test_each_supported_python_is_in_a_combination(script: Any) -> None:
    pythons = [combination.split(":")[0] for combination in script["COMBINATIONS"]]
    assert pythons == [f"3.{minor}" for minor in range(10, 15)]
    assert f'requires-python = ">={pythons[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_a_python_that_is_missing_is_named(tmp_path: Path) -> None:
    other = "3.13" if sys.version_info[:2] == (3, 12) else "3.12"
    (tmp_path / f"python{other}").write_text("#!/bin/sh\nexit 127\n")  # as pyenv's, for a Python that is not active
    (tmp_path / f"python{other}").chmod(0o755)
    command = [sys.executable, SCRIPT, f"{other}:2.6.0:2.9.0:newest"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert f"there is no python{other}" in done.stderr


@pytest.mark.parametrize("combination", ["2.6.0:newest", "3.11:2.6.0:2.9.0:oldset"])
def test_a_combination_is_checked_before_any_is_installed(combination: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, combination], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"such as 3.10:oldest:oldest:oldest, got {combination}" in done.stderr


def test_extras_are_taken_apart(script: Any) -> None:
    found = set(script["requirements"]("test"))
    assert {"timm>=1.0.21", "transformers>=5", f"deepspeed>={OLDEST_DEEPSPEED}", "matplotlib", "hypothesis"} <= found
    assert not [each for each in found if each.startswith("lightning-tricks")]


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_compromised_release_is_not_installed(version: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, f"3.11:{version}:2.13.0:newest"], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"lightning {version} is a compromised release" in done.stderr


LINKED = """
    def __init__(self, folder, python):  # a link instead of an environment
        self.python, self.variables = str(folder / "python"), None
        (folder / "python").symlink_to(sys.executable)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("init", [LINKED, pytest.param("", marks=pytest.mark.slow)], ids=["linked", "made"])
def test_nothing_is_left_behind(init: str, name: str, tmp_path: Path) -> None:
    """The environment is being made, and a process of it has started another."""
    waits = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"""
import runpy, signal, sys, tempfile
from pathlib import Path
tempfile.tempdir = {str(tmp_path)!r}
script = runpy.run_path({str(SCRIPT)!r})
signal.signal(signal.SIGTERM, script["stopped"])
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background are started without
class Environment(script["Environment"]):
{init}
    def make(self, *_):
        self.run("-c", {waits!r})
script["measure"].__globals__["Environment"] = Environment
script["measure"]("{sys.version_info[0]}.{sys.version_info[1]}:2.6.0:2.13.0:newest")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(running(tmp_path)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(getattr(signal, name))
    assert process.wait(60) != 0
    assert list(tmp_path.iterdir()) == []
    while running(tmp_path):  # killed, and not gone at once on a busy machine
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(folder: Path) -> list[str]:
    """The processes of an environment in this folder."""
    listed = subprocess.check_output(["ps", "-wweo", "args"], text=True).splitlines()
    return [line for line in listed if line.startswith(str(folder))]


def test_the_page_is_made_of_the_record(script: Any) -> None:
    rows = json.loads(script["RESULTS"].read_text())
    assert script["PAGE"].read_text() == script["page"](rows)
    assert all(len(row["failures"]) == row["failed"] for row in rows)
