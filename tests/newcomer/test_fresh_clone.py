"""The two commands in a new clone without any environment; some ten minutes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest


def make(clone: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=clone, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("python", ["nowhere/python3", "false"])
def test_without_a_usable_python_the_message_is_readable(clone: Path, environment: dict[str, str], python: str) -> None:
    done = make(clone, environment, "demo", f"PYTHON={python}")
    assert done.returncode != 0
    assert f"error: no Python >= 3.10 among: {python}" in done.stderr


def test_targets_run_files_that_are_there() -> None:
    root = Path(__file__).parent.parent.parent
    named = {*re.findall(r"/python ([\w./]+\.py)\b", (root / "Makefile").read_text())}
    assert {"benchmarks/quality.py", ".ci/clients.py"} <= named
    assert not [path for path in named if not (root / path).is_file()]


@pytest.mark.slow
def test_both_commands_pass(clone: Path, environment: dict[str, str]) -> None:
    """The demo twice, so that it also passes where it has written its report, and installs nothing then."""
    for target, installs in (("demo", True), ("demo", False), ("test", True)):
        done = make(clone, environment, target)
        assert done.returncode == 0, f"make {target}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert ("installing" in done.stdout) == installs
    assert make(clone, environment, "--question", ".venv/.test").returncode == 0  # nothing is left to install
    assert (clone / "demo" / "report.png").exists()
