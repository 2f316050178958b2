"""One ordinary script by every preset, with Lightning's own launcher: train, evaluate, resume, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lightning_tricks as lt
from tests.newcomer.train import digits, network

ROOT = Path(__file__).parents[2]
EPOCHS = 3
STEPS = 1200 // 50  # an epoch's, of one device
# What the machine decides: fp16 on a CPU for DeepSpeed, libaio and a disk for NVMe.
MAY_BE_REFUSED = {"zero2_fp16", "zero2_offload_fp16", "zero3_fp16", "zero3_offload_fp16", "zero3_nvme_bf16"}


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def trained(name: str, devices: int, epochs: int, folder: Path, *ckpt_path: str) -> list[dict[str, Any]] | None:
    """What each rank tells, None if the preset is refused here by a message that names it."""
    done = python(ROOT / "tests/newcomer/train.py", name, str(devices), str(epochs), folder, *ckpt_path)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if name in MAY_BE_REFUSED and f"MisconfigurationException: strategy='{name}'" in last:
        return None
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(devices)]


def exported(checkpoint: Path, output: Path, *more: str) -> torch.nn.Module:
    """The plain network, with the weights that ``lightning-tricks export`` writes."""
    options = ("export", checkpoint, "-o", output, "--strip-prefix", "net.", *more)
    done = python("-m", "lightning_tricks_cli.main", *options)
    assert done.returncode == 0, done.stderr
    net = network()
    net.load_state_dict(load_file(output))
    return net


@torch.no_grad()
def logits_and_accuracy(net: torch.nn.Module) -> tuple[torch.Tensor, float]:
    x, y = (torch.stack(part) for part in zip(*digits()[2], strict=True))
    logits = net(x)
    return logits, (logits.argmax(-1) == y).float().mean().item()


# The first needs a plan, and the second refuses the script's EMA.
PRESETS = [row for row in lt.presets() if row["name"] not in ("tp_bf16", "ddp_diloco_bf16")]


@pytest.mark.slow
@pytest.mark.parametrize("row", PRESETS, ids=lambda row: row["name"])
def test_a_plain_script(row: dict[str, Any], tmp_path: Path) -> None:
    name = row["name"]
    devices = 1 if row["strategy"] == "SinglePreset" else 2
    if trained(name, devices, EPOCHS, tmp_path) is None:
        pytest.skip(f"{name} is refused on this machine")
    ranks = trained(name, devices, EPOCHS + 1, tmp_path, "last")
    assert ranks is not None
    first, last = ranks[0], tmp_path / "last.ckpt"
    assert first["steps"] == (EPOCHS + 1) * STEPS // devices
    assert first["precision"] == row["precision"]
    assert first["fit"] == first["validate"]
    for rank in ranks:
        assert all(rank[key] == first[key] for key in first.keys() - {"logits"})

    logits, accuracy = logits_and_accuracy(exported(last, tmp_path / "last.safetensors"))
    assert accuracy > 0.8
    assert first["test"] == pytest.approx(accuracy, abs=0.01)  # 16 bits there, 32 here
    for number, rank in enumerate(ranks):
        torch.testing.assert_close(torch.tensor(rank["logits"]), logits[number::devices], atol=0.05, rtol=0.02)
    if not last.is_dir():  # folders keep the raw weights apart, each rank its own
        raw, _ = logits_and_accuracy(exported(last, tmp_path / "raw.safetensors", "--which", "raw"))
        assert (raw - logits).abs().max() > 0.1
    best = exported(Path(first["best_path"]), tmp_path / "best.safetensors")
    assert first["best"] == pytest.approx(logits_and_accuracy(best)[1], abs=0.01)

    done = python("-m", "lightning_tricks_cli.main", "consolidate", last, "-o", tmp_path / "whole.safetensors")
    if last.is_dir():
        assert done.returncode == 0, done.stderr
        whole = {key.removeprefix("net."): each for key, each in load_file(tmp_path / "whole.safetensors").items()}
        assert all(torch.equal(each, whole[key]) for key, each in load_file(tmp_path / "last.safetensors").items())
    else:
        assert (done.returncode, "take its weights with lightning-tricks export" in done.stderr) == (1, True)
