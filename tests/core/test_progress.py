"""Bars: drawn on a terminal, on rank zero, and nowhere else."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from tests.ranks import run_alone

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
rank_zero_only.rank = RANK
print("---", file=sys.stderr)
lt.average_checkpoints(["1.pt", "3.pt"], "mean.pt")
lt.greedy_soup(["1.pt", "3.pt"], lambda state: 0.0, "soup.pt")
lt.consolidate("sharded", "whole.safetensors")
lt.find_lr(trainer, BoringModel(), max_lr=1e-4, steps=10)
"""
BARS = ("averaging", "scoring checkpoints", "scoring soups", "writing", "find_lr")


def shown(folder: Path, rank: int, *, terminal: bool) -> str:
    """What the long work writes to stderr; nothing to stdout."""
    written, said = run_alone(work, folder, rank, terminal)
    assert said == ""
    return written.partition("---")[2]


def work(folder: Path, rank: int, terminal: bool) -> tuple[str, str]:
    """Both streams of a process that does the long work."""
    os.chdir(folder)
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:  # a new one has no columns
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with TemporaryFile() as stdout, ThreadPoolExecutor(1) as pool:
        os.dup2(stdout.fileno(), 1)
        os.dup2(writer, 2)
        os.close(writer)
        written = pool.submit(read, reader)
        exec(WORK, {"RANK": rank})
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        stdout.seek(0)
        return written.result(60).decode(), stdout.read().decode()


def read(reader: int) -> bytes:
    written = b""
    with suppress(OSError):  # the end, of a terminal
        while part := os.read(reader, 4096):
            written += part
    return written


def test_bars_are_drawn_on_a_terminal_and_gone_afterwards(tmp_path: Path) -> None:
    written = shown(tmp_path, 0, terminal=True)
    assert [bar for bar in BARS if f"\r{bar}: " not in written] == []
    assert "/10 [" in written  # steps of find_lr
    assert written.rpartition("\r")[0].endswith(" ")  # the line was emptied


def test_nothing_is_drawn_without_a_terminal_or_on_another_rank(tmp_path: Path) -> None:
    for rank, terminal in ((0, False), (1, True)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        written = shown(folder, rank, terminal=terminal)
        assert not any(f"{bar}:" in written for bar in BARS)
