"""find-workers: what it prints, and that what is wrong is said on one line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_tricks_cli.main import main
from tests.cli.test_main import assert_one_line

DIGITS = Path(__file__).parent.parent.parent / "configs" / "digits.yaml"
QUICK = ["--most", "1", "--seconds", "0.05", "--rounds", "2"]
NET = """
from torch.utils.data import DataLoader
from tests.nets import NormNet
from tests.callbacks.test_data_wait import Slow

class SlowNet(NormNet):
    def train_dataloader(self):
        return DataLoader(Slow(0.005), 4)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


def run(*arguments: Any) -> int:
    return main(["find-workers", *map(str, arguments)])


@pytest.mark.slow
def test_it_prints_the_arguments_of_the_loader_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-c", DIGITS, *QUICK) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("DataLoader(..., num_workers=")
    assert second.startswith("A step takes ")
    assert os.listdir(folder) == []


def test_json_of_a_module_in_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("slow_here.py").write_text(NET)
    Path("config.yaml").write_text(json.dumps({"seed_everything": 1, "model": {"class_path": "slow_here.SlowNet"}}))
    assert run("-c", "config.yaml", *QUICK, "--step-seconds", "0.02", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["seconds"].keys() == {"0", "1"}
    assert result["seconds"]["0"] > 0.038
    assert result["step_seconds"] == 0.02
    assert result["num_workers"] == 1 or result["noisy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "none.yaml"], "There is no file none.yaml."),
        (["-c", DIGITS, "--rounds", "1"], "--rounds must be at least 2, got 1"),
    ],
)
def test_a_wrong_argument_is_one_line_on_stderr_and_exit_code_1(
    arguments: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 1
    assert_one_line(capsys, message)
