"""The command suggest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import lightning_tricks as lt
from lightning_tricks.advisor.simulate.devices import DEVICES
from lightning_tricks_cli.commands.suggest import KINDS
from lightning_tricks_cli.main import main


def run(*arguments: str) -> int:
    return main(["suggest", *arguments])


def test_it_prints_a_trainer_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    machines = ("--device-memory", "80GB", "--devices", "8", "--host-memory", "1TB")
    assert run("7B", *machines) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "Trainer(strategy='fsdp2_bf16', devices=8, num_nodes=1, accumulate_grad_batches=1)"
    assert any(line.startswith("fsdp2_bf16 takes 31.5 GB of 80 GB") for line in rest)


def test_what_was_considered_is_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    machines = ("--device-memory", "80GB", "--devices", "8", "--host-memory", "1TB")
    assert run("7B", *machines) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    first, second, third, *_ = cells
    assert first == ["ddp_bf16", "140 GB", "no", "needs 68 GB more on each device, even without activations."]
    assert second == ["fsdp2_bf16", "31.5 GB", "yes", "suggested"]
    assert third == ["ddp_bf16", "84.2 GB", "no", "with --optimizer adamw8bit"]
    assert not any(line.startswith(("ddp_bf16 needs", "With ")) for line in lines), "said in the table"
    monkeypatch.setenv("COLUMNS", "60")
    assert run("7B", *machines) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines() if line[0] in "┏┃┡│└") <= 60


@pytest.mark.parametrize(
    ("arguments", "preset"),
    [
        (["--nodes", "2", "--links", "slow"], "ddp_compressed_bf16"),
        (["--no-bf16"], "ddp_fp16"),
        (["--device-memory", "1GiB"], "fsdp2_bf16"),
        (["--device-memory", "1GiB", "--optimizer", "adamw8bit"], "ddp_bf16"),
    ],
)
def test_the_machines_decide(arguments: list[str], preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("50M", "--device-memory", "24GB", "--devices", "8", *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == preset


def test_a_laptop_plans_for_a_large_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("7B", "--device-memory", "80GB") == 0
    shown = re.sub(r"[ │]+", " ", capsys.readouterr().out)
    assert shown.startswith("Trainer(strategy='zero2_offload_bf16', devices=1, ")
    assert "host memory" in shown
    assert "was assumed" in shown
    assert "(--host-memory)." in shown
    assert " single_bf16 84.2 GB no with --optimizer adamw8bit " in shown
    assert " single_bf16 4.14 GB yes with LoRA(r=8, base='nf4') on all linear layers " in shown
    assert run("7B", "--device-memory", "80GB", "--batch-size", "3") == 1
    assert "--batch-size 3 needs a model to measure, got TARGET '7B'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--devices", "--nodes", "--batch-size"])
def test_a_wrong_number_is_told_by_its_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("7B", flag, "0")
    assert f"argument {flag}: '0' is not a positive integer" in capsys.readouterr().err


@pytest.mark.slow
def test_batch_size_and_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--device-memory", "1GB", "--devices", "2", "--batch-size", "512")
    assert run("timm:vit_tiny_patch16_224", *arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accumulate_grad_batches"] > 1
    assert 512 <= found["effective_batch_size"] < 512 + 2 * found["accumulate_grad_batches"]


def test_without_a_device_its_memory_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("7B") == 1
    assert "pass --device-memory," in capsys.readouterr().err
    assert run("7Q") == 1
    assert "'7Q' is not a model: pass a LightningCLI configuration" in capsys.readouterr().err
    assert run("7B", "--device-memory", "8GB", "--host-memory", "1GB") == 1
    error = capsys.readouterr().err
    assert "Nothing fits." in error
    assert "NVMe disk (--nvme)" in error
    for wrong in ("8 apples", "24"):
        with pytest.raises(SystemExit, match="2"):
            run("7B", "--device-memory", wrong)
        assert f"{wrong!r} is not a size: write for example 24GB" in capsys.readouterr().err


def test_kinds_of_devices_are_those_of_the_package() -> None:
    assert list(KINDS) == list(DEVICES)


def test_a_plan_for_many_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ("70B", "--device", "h100", "--nodes", "32", "--batch-size", "1024")
    assert run(*arguments, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    plan = lt.suggest_plan(
        lt.TransformerShape.of(70_000_000_000), hardware=lt.Hardware.of("h100", devices=8, nodes=32), batch_size=1024
    )
    assert told == json.loads(json.dumps(plan.to_dict()))
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == plan.head()[0]
    assert plan.notes()[1] in text
    assert f"{plan.tokens_per_second:,.0f}" in text


def test_the_shape_is_that_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, "intermediate_size": 2816}
    (file := tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 32000}))
    assert run(str(file), "--device", "a100", "--nodes", "2", "--sequence-length", "1024", "--json") == 0
    shape = lt.TransformerShape(4, 1024, 16, 32000, 1024, key_heads=8, hidden=2816, gated=True)
    plan = lt.suggest_plan(shape, hardware=lt.Hardware.of("a100", devices=8, nodes=2))
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(plan.to_dict()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("timm:resnet18",), "'timm:resnet18' has no shape of a transformer: with --device h100, pass a number"),
        (("7B", "--host-memory", "1TB"), "--host-memory 1000000000000.0 is not simulated"),
        (("7B", "--no-bf16"), "--no-bf16 is not simulated"),
        (("1T",), "Nothing fits."),
    ],
)
def test_what_is_not_simulated_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--device", "h100") == 1
    assert message in capsys.readouterr().err


def test_many_devices_without_a_kind_are_told_of_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("7B", "--device-memory", "80GB", "--devices", "8", "--nodes", "2") == 0
    assert "simulated tokens a second: suggest_plan, or --device" in capsys.readouterr().out
