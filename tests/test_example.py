"""The worked example of CONTRIBUTING.md: added to a copy of the checkout by the text alone, it is a correct trick."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE, TEST, ENTRY = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
FILES = {"lightning_tricks/callbacks/jitter.py": SOURCE, "tests/callbacks/test_jitter.py": TEST}


def with_source(copy: Path) -> Path:
    """A copy of the checkout with the source file of the example, and what `make exports` writes for it."""
    left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "shared", "site")  # bytecode saves seconds
    shutil.copytree(ROOT, copy, ignore=left_out)
    (copy / "lightning_tricks/callbacks/jitter.py").write_text(SOURCE)
    for script in (".ci/exports.py", ".ci/names.py"):
        assert run(copy, script).returncode == 0
    return copy


def with_everything(copy: Path) -> Path:
    """The same with the test and the entry of the example."""
    with_source(copy)
    (copy / "tests/callbacks/test_jitter.py").write_text(TEST)
    settings = copy / "tests/conformance/settings.py"
    before, first, after = re.split(r"^(SETTINGS: .*\{\n)", settings.read_text(), flags=re.M)
    imported = "from tests.callbacks.test_jitter import NaiveJitter\n"
    settings.write_text(before + imported + first + ENTRY + after)
    return copy


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run([sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True)


def told(copy: Path, *arguments: str) -> str:
    """What pytest writes."""
    return run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments).stdout


def missing(copy: Path) -> list[str]:
    """What the one message says that the example lacks."""
    output = told(copy, "tests/test_architecture.py::test_a_trick_has_all_that_it_needs")
    return re.findall(r"^E +- Jitter \(lightning_tricks\.callbacks\.jitter\): (.*)$", output, re.M)


@pytest.mark.slow
def test_one_message_names_everything_that_is_missing(tmp_path: Path) -> None:
    assert missing(with_source(tmp_path / "copy")) == [
        "a line in CHANGELOG.md",
        "a test in tests/callbacks/",
        "its card in lightning_tricks_cli/cards/, whose front matter is its row in lists",
        "a test in tests/clients/of_*.py, or in its entry no_client=, why not (a function: in LEFT_OUT)",
        "an entry in SETTINGS of tests/conformance/settings.py, which enrols it in every regime",
    ]


@pytest.mark.slow
def test_the_example_is_a_correct_trick(tmp_path: Path) -> None:
    copy = with_everything(tmp_path / "copy")
    regimes = ["tests/conformance/test_naive.py", "tests/conformance/test_no_op.py", "tests/conformance/test_yaml.py"]
    output = told(copy, "-k", "jitter", *FILES, *regimes)
    assert re.search(r"^\d+ passed(, \d+ deselected)? in", output, re.M), output


@pytest.mark.slow
def test_the_example_passes_every_conformance_case(tmp_path: Path) -> None:
    """All but those of the table that `make matrix` writes, which takes an hour."""
    copy = with_everything(tmp_path / "copy")
    assert missing(copy) == [
        "a line in CHANGELOG.md",
        "its card in lightning_tricks_cli/cards/, whose front matter is its row in lists",
        "a row in the compatibility matrix: run `make matrix`",
    ]
    output = told(copy, "-m", "", "-k", "jitter", "--ignore=tests/conformance/test_matrix.py", "tests/conformance")
    passed = re.search(r"^(\d+) passed, \d+ deselected in", output, re.M)
    assert passed, output
    assert int(passed[1]) > 70


@pytest.mark.parametrize("file", FILES)
def test_the_code_of_the_example_has_the_style_of_the_house(file: str) -> None:
    for command in (["check", "--ignore", "I001"], ["format", "--check"]):  # imports of a file that is not there
        command = [sys.executable, "-m", "ruff", *command, "--stdin-filename", file, "-"]
        done = subprocess.run(command, input=FILES[file], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
