"""A new clone, and a home without any caches."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
collect_ignore = ["own.py", "wheel.py"]  # scripts, not to be imported for doctests


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("newcomer") / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a new shell: variables that make gives to what it starts would reach the make of the test."""
    inherited = {
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTEST_ADDOPTS",
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
        "PYTHON",
        "TORCH",
        "ONLY",
        "FULL",
    }
    kept = {name: value for name, value in os.environ.items() if name not in inherited}
    return {**kept, "HOME": str(tmp_path_factory.mktemp("home")), "XDG_CACHE_HOME": ""}
