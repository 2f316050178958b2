"""The command's exit codes and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tricks.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "lightning-tricks: seeds must be at least 1, got 0."),
        (["--epochs", "-1"], "lightning-tricks: epochs must be at least 1, got -1."),
        (["--noise", "1.5"], "lightning-tricks: noise must be in [0.0, 1.0], got 1.5."),
    ],
)
def test_a_wrong_value_is_one_line_on_stderr_and_exit_code_1(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--output", str(tmp_path), *arguments]) == 1
    assert capsys.readouterr().err == message + "\n"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds"):
        main(["--debug", "demo", "--seeds", "0", "--output", str(tmp_path)])


@pytest.mark.parametrize("module", ["rich.console", "matplotlib", "sklearn.datasets"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo", "--output", str(tmp_path)]) == 1
    assert "pip install 'lightning_tricks[demo]'" in capsys.readouterr().err


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["dmeo"])
    assert "invalid choice: 'dmeo'" in capsys.readouterr().err


def test_the_command_is_installed_and_helps() -> None:
    command = Path(sys.executable).with_name("lightning-tricks")
    shown = subprocess.run([command, "demo", "--help"], capture_output=True, text=True, check=True)
    assert "example: lightning-tricks demo" in shown.stdout
