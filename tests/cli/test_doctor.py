"""``lightning-tricks doctor``: prints what ``environment_report`` says and succeeds whatever is missing."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import lightning_tricks as lt
from lightning_tricks.cli.main import main


def test_json_is_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert [preset["name"] for preset in report["presets"]] == [row["name"] for row in lt.presets()]
    assert {preset["status"] for preset in report["presets"]} <= {"runs", "slower", "cannot run"}


@pytest.mark.parametrize("rich", [True, False])
def test_without_deepspeed_it_says_what_to_do(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    words = " ".join(out.replace("│", " ").split())
    assert "deepspeed missing" in words
    assert "zero1_bf16 cannot run deepspeed is not installed" in words
    assert "pip install 'lightning-tricks[deepspeed]' for zero1_bf16, zero2_bf16" in words
    assert max(len(line) for line in out.splitlines() if "zero1" in line and "cannot" in line) <= 80
    assert ("┃" in out) == rich
