"""Bytes of EMA's state on each rank, for 1, 2 and 4 ranks: whole under DDP, a share under FSDP2 and ZeRO-3.

Each case is a fit of two steps in real processes, started by torchrun; the figure is the largest of the ranks, over
the bytes of the whole weights in fp32. No time is measured, so two cases run at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rows import Row, row, target
from settings import Settings

NAME = "ranks"
PEERS = ("deepspeed",)
LIMIT = 120  # seconds of a fit of two steps, with the start of its processes
SCRIPT = Path(__file__).parent.parent / "ranks_fit.py"
STRATEGIES = {"DDP": "ddp_bf16", "FSDP2": "fsdp2_bf16", "ZeRO-3": "zero3_bf16"}


def shares(strategy: str, ranks: int, device: str) -> list[float]:
    """What each rank holds."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(SCRIPT), strategy, device, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def run(settings: Settings) -> list[Row]:
    """Each strategy with each number of ranks; one that fails has a row that says so."""
    strategies = settings.pick("strategies", tuple(STRATEGIES), ("FSDP2",), ("FSDP2",))
    numbers = settings.pick("ranks", (1, 2, 4), (1, 2), (2,))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda case: found(*case, settings.device), product(strategies, numbers)))


def found(what: str, ranks: int, device: str) -> Row:
    """The row of a case."""
    case, name, unit = f"EMA's state on a rank, {what}", f"{ranks} ranks", "copies of the weights"
    try:
        return row(case, name, [max(shares(STRATEGIES[what], ranks, device))], unit)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return Row(case, name, unit, None, note=f"failed: {error}")


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A rank's share, and what padding takes."""
    found = []
    for each in rows:
        ranks = 1 if each.case.endswith("DDP") else int(each.what.split()[0])
        found.append(
            target(f"{each.case.split(', ')[1]}, {each.what}: copies", each.median, "<=", round(1.05 / ranks, 4))
        )
    return found
