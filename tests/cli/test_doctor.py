"""``lightning-tricks doctor``: prints what ``environment_report`` says and succeeds whatever is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import lightning_tricks as lt
from lightning_tricks.core.install import pip_install
from lightning_tricks_cli.main import main
from tests.nets import PlainNet


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
    assert f"{pip_install('deepspeed')} for zero1_bf16, zero2_bf16" in words
    assert max(len(line) for line in out.splitlines() if "zero1" in line and "cannot" in line) <= 80
    assert ("┃" in out) == rich


def test_a_stale_lock_of_deepspeeds_compiler_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "500")
    assert main(["doctor"]) == 0
    assert f"{lock}, which the next run removes" in capsys.readouterr().out
    assert lock.exists()


CONFIG = """
seed_everything: 0
trainer: {strategy: zero3_bf16, devices: 8, accelerator: cuda}
model: {class_path: tests.cli.test_doctor.Reused}
data: {class_path: lightning_tricks.examples.digits.DigitsData}
"""


class Reused(PlainNet):
    """One activation at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.layers[1])


def test_the_model_of_a_configuration_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert main(["doctor", "-c", str(tmp_path / "config.yaml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert finding["rule"] == "reused-modules"
    assert "layers.1, layers.3" in finding["text"]
    assert report["presets"]
    assert main(["doctor", "-c", str(tmp_path / "config.yaml")]) == 0
    assert "reused-modules: one Tanh is used at layers.1, layers.3" in capsys.readouterr().out


def test_a_missing_configuration_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-c", "nowhere.yaml"]) == 1
    assert "nowhere.yaml" in capsys.readouterr().err
