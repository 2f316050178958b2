"""The conformance suite with a ``pytorch_lightning.Trainer``: a slice of it, or with ``-m slow`` all of it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

from pytorch_lightning_tricks.loader import SOURCE
from tests.ranks import run_ranks

SUITE = "tests/conformance"
SLICE = (  # run by tests/conformance/test_namespace.py, in the process that it has anyway
    *(f"{SUITE}/test_resume.py::test_a_resumed_run_is_bit_equal[{name}]" for name in ("EMA", "SAMMixin", "AutoClip")),
    *(f"{SUITE}/test_yaml.py::test_a_configuration_file_gives_the_same[{name}]" for name in ("EMA", "SAMMixin")),
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


def load_tests_again() -> None:
    """In a process of ``tests.ranks``, whose tests have Lightning's usual name so far."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    import_module("tests.pytorch_lightning.namespace")


def run_slice(folder: str, names: Sequence[str]) -> list[str]:
    """The names of the tests that passed, with the name of the Lightning that they had."""
    found: list[str] = []

    class Passed:
        def pytest_runtest_call(self, item: pytest.Function) -> None:
            functions = filter(inspect.isfunction, vars(item.module).values())
            ours = next(each for each in functions if each.__module__ == "tests.nets")
            found.append(f"{item.nodeid} {ours.__globals__['L'].__name__}")

    load_tests_again()
    os.chdir(SOURCE.parent)
    options = ["-q", "-m", "", "--assert=plain", "-p", "no:cacheprovider", "--basetemp", folder]
    with redirect_stdout(StringIO()) as printed:
        assert pytest.main([*options, *names], plugins=[Passed()]) == 0, printed.getvalue()
    return found


def preset_and_apart() -> str:
    load_tests_again()
    tests = import_module("tests.conformance.test_presets")
    tests.preset_and_apart({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
    return tests.L.__name__


@pytest.mark.slow
def test_two_ranks_of_a_preset_equal_strategy_and_precision_apart() -> None:
    assert run_ranks(preset_and_apart) == ["pytorch_lightning"] * 2


@pytest.mark.slow
def test_the_conformance_suite(tmp_path: Path) -> None:
    # The table of the docs, which other runs write, and what runs the others with this name itself.
    without = [f"--ignore={SUITE}/{name}.py" for name in ("test_matrix", "test_namespace")]
    assert passed(tmp_path, SUITE, *without, "-m", "not gpu") > 800
