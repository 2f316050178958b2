"""What the step that saves takes longer than others: a save that training waits for, and one that it does not.

A fit of a stack of linear layers with AdamW saves every ten steps by ModelCheckpoint, which keeps one. A folder is that
of FSDP2, here of one process, as a file is. Lightning's AsyncCheckpointIO has no folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from fitted import QUIET, AdamNet, Laps, drawn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from rows import Row, figure, rows_of, target
from settings import SEED, Settings
from timing import fits, in_turns
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt

NAME = "async_save"
PEERS = ()
WAITED, LATER, PEER = "async_save=False", "async_save=True", "Lightning AsyncCheckpointIO"
PRESETS = {"file": "single_bf16", "folder": "fsdp2_bf16"}
SAVES, GAP = 3, 10  # saves in a fit, and the steps from one to the next


def stall(kind: str, what: str, layers: int, width: int, device: str) -> float:
    """Microseconds that a step that saves takes longer than the faster half of all steps, which no write slows."""
    torch.manual_seed(SEED)
    laps, steps = Laps(1), GAP * (SAVES + 1)
    network = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 10))
    with TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator=device,
            callbacks=[laps, ModelCheckpoint(folder, every_n_train_steps=GAP)],
            plugins=[AsyncCheckpointIO()] if what == PEER else [],
            **{
                **QUIET,
                **lt.preset(PRESETS[kind], precision="32-true", async_save=what == LATER),
                "enable_checkpointing": True,
            },
        )
        trainer.fit(AdamNet(network), DataLoader([drawn((64, width), 10, device)] * steps, batch_size=None))
    if dist.is_initialized():  # FSDP2's
        dist.destroy_process_group()
    taken = [after - before for before, after in pairwise(laps.marks)]
    others = median(sorted(taken)[: len(taken) // 2])
    return median(taken[GAP * number - 1] for number in range(1, SAVES + 1)) - others


def run(settings: Settings) -> list[Row]:
    """The stalls, with their ratio to that of a save that is waited for."""
    sizes = settings.pick("layers", 6, 4, 2), settings.pick("width", 1024, 512, 32)
    rounds = settings.pick("rounds", 5, 2, 1)
    found: list[Row] = []
    for kind in PRESETS:
        contenders = (WAITED, LATER, PEER) if kind == "file" else (WAITED, LATER)
        turns = fits(
            {what: lambda kind=kind, what=what: stall(kind, what, *sizes, settings.device) for what in contenders}
        )
        found += rows_of(kind, in_turns(turns, rounds, warm_up=0), WAITED, "ms")
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A step waits for the copy, which takes less than the write."""
    return [
        target(
            f"stall over that of a save that is waited for, {kind}", figure(rows, kind, LATER, "over_floor"), "<=", 0.5
        )
        for kind in PRESETS
    ]
