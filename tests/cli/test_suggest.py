"""The command suggest."""

from __future__ import annotations

import json
import re

import pytest
import torch

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
