"""Ranks killed under torchrun, which starts them again: training ends with the weights of one that nothing disturbs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nets import assert_equal

ROOT = Path(__file__).parents[2]
TIMEOUT = 120  # s for a start
EPOCHS = 80


def torchrun(folder: Path, engine: str, restarts: int) -> subprocess.Popen[bytes]:
    folder.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    # torch (2.5 to 2.13) restarts ranks with the addresses of the dead ones otherwise, issue 135712.
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *command, "-m", "tests.faults.elastic", str(folder), engine, str(EPOCHS)],
            env={**os.environ, **own},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def begun(folder: Path, after: int, process: subprocess.Popen[bytes]) -> tuple[int, list[int]]:
    """The next attempt in which both ranks have begun a fit, and their processes; one may fail before that."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        for attempt in range(after + 1, after + 5):
            lines = [told(folder, attempt, rank) for rank in range(2)]
            if all(lines):
                return attempt, [int(each[0]) for each in lines]
        time.sleep(0.005)


def told(folder: Path, attempt: int, rank: int) -> list[str]:
    file = folder / f"{attempt}-{rank}"
    return file.read_text().splitlines() if file.exists() else []


def final(folder: Path, process: subprocess.Popen[bytes]) -> list[Any]:
    """What the ranks have at the end."""
    process.wait(timeout=300)
    assert process.returncode == 0, (folder / "log").read_text()
    return [torch.load(folder / f"final-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kills", "seed"), [("ddp_bf16", 20, 1), ("fsdp2_bf16", 20, 2), ("zero1_bf16", 5, 3)]
)
def test_ranks_killed_at_random_moments(engine: str, kills: int, seed: int, tmp_path: Path) -> None:
    expected = final(tmp_path / "whole", torchrun(tmp_path / "whole", engine, 0))
    rng, folder, doing, attempt = random.Random(seed), tmp_path / "killed", Counter[str](), -1
    process = torchrun(folder, engine, kills + 5)
    try:
        for _ in range(kills):
            attempt, ranks = begun(folder, attempt, process)
            time.sleep(rng.uniform(0, 0.4))
            (rank,) = rng.sample(range(2), 1)
            os.kill(ranks[rank], signal.SIGKILL)
            word = told(folder, attempt, rank)[-1]
            doing["starting" if word.isdigit() else word] += 1
            print(f"seed {seed}, attempt {attempt}: killed rank {rank} while {word}")  # shown when the test fails
        ended = final(folder, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for (mine, step), (others, last) in zip(ended, expected, strict=True):
        assert_equal(mine, others)
        assert step == last == 6 * EPOCHS
    assert kills < 20 or doing.keys() >= {"starting", "training", "saving"}  # the kills did land where it matters
