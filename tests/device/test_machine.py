"""The tests on a machine that has a GPU: those of the CPU pass, and those that need it are told from others."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.device.python_names import simulated
from tests.nets import NormNet, assert_equal, build, fit, weights
from tests.ranks import run_alone

TESTS = """
import pytest

def test_on_the_cpu():
    pass

@pytest.mark.gpu
def test_on_a_gpu():
    raise AssertionError("there is none")
"""


def test_a_trainer_for_the_cpu_beside_a_gpu_is_no_error() -> None:
    expected, module = build(NormNet), build(NormNet)
    fit(expected)
    with simulated() as simulation:
        fit(module)  # Lightning warns that there is a GPU, which is not used
    assert simulation.waits == []
    assert_equal(weights(module), weights(expected))


def passed_and_skipped(folder: str) -> tuple[int, int]:
    reports: list[pytest.TestReport] = []

    class Reports:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            reports.append(report)

    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "markers=gpu", "-q", folder]
    with redirect_stdout(StringIO()) as printed:
        assert pytest.main(options, plugins=[Reports()]) == 0, printed.getvalue()
    return sum(r.when == "call" and r.passed for r in reports), sum(r.skipped for r in reports)


def test_a_folder_named_gpu_needs_none(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "test_of_a_clone.py").write_text(TESTS)
    assert run_alone(passed_and_skipped, str(tmp_path)) == (1, 1)
