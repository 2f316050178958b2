"""The two commands in a new clone without any environment, twice in a row; some ten minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(clone: Path, target: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTEST_ADDOPTS")}
    return subprocess.run(
        ["make", target, *(f"{name}={value}" for name, value in variables.items())],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer") / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("python", ["nowhere/python3", "false"])
def test_without_a_usable_python_the_message_is_readable(clone: Path, python: str) -> None:
    done = make(clone, "demo", PYTHON=python)
    assert done.returncode != 0
    assert f"error: no Python >= 3.10 among: {python}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", ["demo", "test"])
def test_both_commands_pass_twice_in_a_row(clone: Path, target: str) -> None:
    for attempt in ("first", "second"):
        done = make(clone, target)
        assert done.returncode == 0, f"{attempt} make {target}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert ("installing" in done.stdout) == (attempt == "first")
    assert (clone / "demo" / "report.png").exists()
