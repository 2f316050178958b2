"""The command memory: what a TARGET can be, and what is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_tricks.core.install import pip_install
from lightning_tricks_cli.main import main

DIGITS = Path(__file__).parent.parent.parent / "configs" / "digits_schedule.yaml"
BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with configurations of transformers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("bert.json").write_text(json.dumps(BERT))
    Path("other.json").write_text("{}")
    Path("broken.json").write_text("{x")
    return tmp_path


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["memory", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("target", "count"), [("7B", 7e9), ("7e9", 7e9), ("1.5m", 1.5e6), ("25000000", 25e6)])
def test_a_count(target: str, count: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, target)
    assert (found["weights"], found["batch_size"]) == (4 * count, None)


@pytest.mark.slow
def test_a_model_of_timm(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--batch-size", "64", "--strategy", "ddp_bf16", "--devices", "8", "--extras", "ema")
    found = numbers(capsys, "timm:vit_tiny_patch16_224", *arguments)
    assert found["weights"] == found["extras"] == 4 * 5_717_416
    assert (found["world"], found["batch_size"], found["precision"]) == (8, 64, "bf16-mixed")
    assert found["activations"] > 500e6


@pytest.mark.slow
def test_a_configuration_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    found = [numbers(capsys, "bert.json", "--sequence-length", length) for length in ("64", "128")]
    assert found[0]["weights"] == found[1]["weights"]
    assert found[1]["activations"] > 1.5 * found[0]["activations"]


def test_a_configuration_of_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, str(DIGITS), "--batch-size", "4096", "--optimizer", "sgd")
    assert found["optimizer"] == 0
    assert found["activations"] > 4096 * 64 * 4


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "7B", "--strategy", "zero3_offload_bf16", "--devices", "8"]) == 0
    out = capsys.readouterr().out
    assert "in the memory of each node" in out
    assert "126 GB" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["7Q"], "'7Q' is not a model: pass a LightningCLI configuration (.yaml)"),
        (["none.yaml"], "There is no file none.yaml."),
        (["none.json"], "There is no file none.json."),
        (["other.json"], "other.json is not a configuration of transformers"),
        (["timm:resnet5000"], "timm has no model 'resnet5000'"),
        (["broken.json"], "broken.json is not JSON: Expecting property name"),
        (["1e400"], "'1e400' is not a model"),
        (["7B", "--strategy", "zero"], "--strategy must be one of"),
        (["7B", "--batch-size", "8"], "--batch-size 8 needs batch="),
        (["7B", "--optimizer", "adamww"], "the name of an optimizer must be one of"),
        (["7B", "--strategy", "fsdp2"], "--strategy must be one of 'auto', "),
        (
            ["7B", "--strategy", "ddp_bf16", "--precision", "32-true"],
            "--strategy ddp_bf16 trains in 'bf16-mixed', got --precision 32-true. Leave --precision out",
        ),
    ],
)
def test_an_error_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lightning-tricks: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("length", ["0", "-4", "many"])
def test_a_length_that_is_none_is_wrong_usage(length: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["memory", "bert.json", f"--sequence-length={length}"])
    assert f"'{length}' is not a positive integer" in capsys.readouterr().err


def test_extras_come_before_the_model_or_after(capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers(capsys, "--extras", "ema,sam", "1m")["extras"] == numbers(capsys, "1m", "--extras=ema,sam")["extras"]


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [("timm", ["timm:resnet18"], "vision"), ("transformers", ["bert.json"], "text"), ("rich.bar", ["7B"], "cli")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    module: str, arguments: list[str], extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["memory", *arguments]) == 1
    assert pip_install(extra) in capsys.readouterr().err
