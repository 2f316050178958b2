"""The conformance suite with a ``pytorch_lightning.Trainer``: a slice of it, or with ``-m slow`` all of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytorch_lightning_tricks.loader import SOURCE

SUITE = "tests/conformance"
SLICE = (
    f"{SUITE}/test_no_op.py::test_the_trick_does_something_unless_it_is_to_be_neutral",
    *(f"{SUITE}/test_resume.py::test_a_resumed_run_is_bit_equal[{name}]" for name in ("EMA", "SAMMixin", "AutoClip")),
    *(f"{SUITE}/test_yaml.py::test_a_configuration_file_gives_the_same[{name}]" for name in ("EMA", "SAMMixin")),
    f"{SUITE}/test_presets.py::test_two_ranks_of_a_preset_equal_strategy_and_precision_apart",
)


def passed(folder: Path, *arguments: str) -> int:
    """How many tests passed, if all did."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.pytorch_lightning.namespace", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--basetemp", str(folder)],
        capture_output=True,
        text=True,
        cwd=SOURCE.parent,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])


def test_a_slice_of_the_conformance_suite(tmp_path: Path) -> None:
    assert passed(tmp_path, *SLICE) > 30


@pytest.mark.slow
def test_the_conformance_suite(tmp_path: Path) -> None:
    deselect = "--deselect", f"{SUITE}/test_matrix.py"  # the table of the docs, which other runs write
    assert passed(tmp_path, SUITE, *deselect, "-m", "not gpu") > 800
