"""Bars: drawn on a terminal, on rank zero, and nowhere else."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORK = """
import sys, warnings
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.rank_zero import rank_zero_only
import lightning_tricks as lt

warnings.simplefilter("ignore")
for value in (1.0, 3.0):
    torch.save({"w": torch.tensor([value])}, f"{value:.0f}.pt")
dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id="sharded", no_dist=True)
torch.save({}, "sharded/meta.pt")
trainer = Trainer(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
rank_zero_only.rank = int(sys.argv[1])
print("---", file=sys.stderr)
lt.average_checkpoints(["1.pt", "3.pt"], "mean.pt")
lt.greedy_soup(["1.pt", "3.pt"], lambda state: 0.0, "soup.pt")
lt.consolidate("sharded", "whole.safetensors")
lt.find_lr(trainer, BoringModel(), max_lr=1e-4, steps=10)
"""
BARS = ("averaging", "scoring checkpoints", "scoring soups", "writing", "find_lr")


def shown(folder: Path, rank: int, *, terminal: bool) -> str:
    """What the long work writes to stderr."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:  # a new one has no columns
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", WORK, str(rank)]
    with os.fdopen(writer, "wb") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    written = b""
    try:
        while part := os.read(reader, 4096):
            written += part
    except OSError:  # the end, of a terminal
        pass
    os.close(reader)
    assert (process.communicate()[0], process.returncode) == (b"", 0), written.decode()
    return written.decode().partition("---")[2]


@pytest.mark.slow
def test_bars_are_drawn_on_a_terminal_and_gone_afterwards(tmp_path: Path) -> None:
    written = shown(tmp_path, 0, terminal=True)
    assert [bar for bar in BARS if f"\r{bar}: " not in written] == []
    assert "/10 [" in written  # steps of find_lr
    assert written.rpartition("\r")[0].endswith(" ")  # the line was emptied


@pytest.mark.slow
def test_nothing_is_drawn_without_a_terminal_or_on_another_rank(tmp_path: Path) -> None:
    for rank, terminal in ((0, False), (1, True)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        written = shown(folder, rank, terminal=terminal)
        assert not any(f"{bar}:" in written for bar in BARS)
