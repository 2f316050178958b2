"""What a checkpoint costs training that is saved while training goes on: beside a save that is waited for.

A fit of a stack of linear layers with AdamW saves every some steps by ModelCheckpoint, which keeps one. "step" is what
the step that saves takes longer than one that does not; "in all" is what a save adds to the fit, the steps included
that share the machine with the write. A file is that of one process, a folder that of FSDP2, here of one process, too.
Lightning's AsyncCheckpointIO is beside them for a file: it has no folders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from fitted import QUIET, AdamNet, Laps, drawn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from rows import Row, figure, rows_of, target
from settings import SEED, Settings
from timing import Turn, in_turns
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt

NAME = "async_save"
PEERS = ()
WAITED, LATER, PEER = "async_save=False", "async_save=True", "Lightning AsyncCheckpointIO"
PRESETS = {"file": "single_bf16", "folder": "fsdp2_bf16"}
SAVES = 3


def network(layers: int, width: int) -> nn.Module:
    """Layers of equal size before a head of ten classes."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 10))


class Fit:
    """A fit that saves, and what was measured in it."""

    def __init__(self, kind: str, what: str, layers: int, width: int, gap: int, device: str) -> None:
        self.make = partial(network, layers, width)
        self.strategy = partial(lt.preset, PRESETS[kind], precision="32-true", async_save=what == LATER)
        self.plugins: Callable[[], list[Any]] = lambda: [AsyncCheckpointIO()] if what == PEER else []
        self.batch, self.gap = drawn((64, width), 10, device), gap
        self.in_all = 0.0

    def step(self) -> float:
        """Microseconds that a step that saves takes longer than others."""
        torch.manual_seed(SEED)
        laps, steps = Laps(1), self.gap * (SAVES + 1)
        with TemporaryDirectory() as folder:
            checkpoints = ModelCheckpoint(folder, "{step}", every_n_train_steps=self.gap)
            trainer = L.Trainer(
                accelerator=self.batch[0].device.type,
                callbacks=[laps, checkpoints],
                plugins=self.plugins(),
                **{**QUIET, **self.strategy(), "enable_checkpointing": True},
            )
            trainer.fit(AdamNet(self.make()), DataLoader([self.batch] * steps, batch_size=None))
            assert Path(checkpoints.best_model_path).exists()
        taken = [after - before for before, after in pairwise(laps.marks)]
        saving = [taken[number * self.gap - 1] for number in range(1, SAVES + 1)]
        others = median(sorted(taken)[: len(taken) // 2])  # a write slows other steps
        self.in_all = sum(time - others for time in taken[self.gap - 1 :]) / SAVES
        return median(saving) - others


def turn(kind: str, what: str, *sizes: int, device: str) -> Turn:
    """The step that saves, and all that the save costs."""
    fit = Fit(kind, what, *sizes, device=device)
    return {f"step, {what}": fit.step, f"in all, {what}": lambda: fit.in_all}


def run(settings: Settings) -> list[Row]:
    """All figures."""
    sizes = [
        settings.pick("layers", 6, 4, 2),
        settings.pick("width", 1024, 512, 32),
        settings.pick("steps between saves", 10, 10, 4),
    ]
    rounds = settings.pick("rounds", 3, 2, 1)
    found: list[Row] = []
    for kind in PRESETS:
        contenders = (WAITED, LATER, PEER) if kind == "file" else (WAITED, LATER)
        makers = {what: partial(turn, kind, what, *sizes, device=settings.device) for what in contenders}
        measured = in_turns(makers, rounds, warm_up=0)
        for part in ("step", "in all"):
            of_part = measured._replace(times={k: t for k, t in measured.times.items() if k.startswith(part)})
            found += rows_of(f"{part}, {kind}", of_part, f"{part}, {WAITED}", "ms")
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A step waits for the copy, which takes less than the write."""
    return [
        target(
            f"stall of a step over that of a save that is waited for, {kind}",
            figure(rows, f"step, {kind}", f"step, {LATER}", "over_floor"),
            "<=",
            0.5,
        )
        for kind in PRESETS
    ]
