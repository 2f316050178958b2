"""The two commands in a new clone without any environment, twice in a row; some ten minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def make(clone: Path, environment: dict[str, str], target: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["make", target, *(f"{name}={value}" for name, value in variables.items())]
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("python", ["nowhere/python3", "false"])
def test_without_a_usable_python_the_message_is_readable(clone: Path, environment: dict[str, str], python: str) -> None:
    done = make(clone, environment, "demo", PYTHON=python)
    assert done.returncode != 0
    assert f"error: no Python >= 3.10 among: {python}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", ["demo", "test"])
def test_both_commands_pass_twice_in_a_row(clone: Path, environment: dict[str, str], target: str) -> None:
    for attempt in ("first", "second"):
        done = make(clone, environment, target)
        assert done.returncode == 0, f"{attempt} make {target}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert ("installing" in done.stdout) == (attempt == "first")
    assert (clone / "demo" / "report.png").exists()
