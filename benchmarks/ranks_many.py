"""One rank of ``cost/many_ranks.py``, forked from a process that has imported this: fits that write their costs."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from fitted import QUIET, Callbacks, Net, drawn, empty, tiny
from machine import prepare
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt

STEPS = 20
gc.freeze()  # which leaves pages shared


def usual() -> list[L.Callback]:
    """Averages and a guard."""
    return [lt.EMA(), lt.SkipNonFinite()]


def private() -> int:
    """Bytes of this process that it shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private"))


def main(environment: dict[str, str], folder: str) -> None:
    """Fit under DDP without callbacks and with them, and write."""
    os.environ.update(environment)
    prepare(())
    torch.set_num_threads(1)
    ranks = int(environment["WORLD_SIZE"])
    samples = TensorDataset(*drawn((4 * ranks * STEPS, 32), 4, "cpu"))

    def fit(callbacks: Callbacks) -> float:
        """Seconds of this process's work in a step."""
        torch.manual_seed(0)
        module = Net(tiny())
        settings = {**QUIET, "strategy": "ddp_bf16", "devices": ranks, "max_steps": STEPS}
        trainer = L.Trainer(accelerator="cpu", callbacks=callbacks(), **settings)
        began = time.process_time()
        trainer.fit(module, DataLoader(samples, 4))
        return (time.process_time() - began) / STEPS

    fit(empty)  # what is made at the first use
    found = {"plain": fit(empty), "tricks": fit(usual), "bytes": private()}
    Path(folder, f"{environment['RANK']}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
