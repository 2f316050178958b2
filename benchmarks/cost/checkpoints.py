"""Saving a checkpoint, resuming from it, and its size: EMA beside a stock Trainer and beside Lightning's averaging."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from fitted import PLAIN, QUIET, AdamNet, Callbacks, architecture, drawn, empty, tiny
from lightning.pytorch.callbacks import EMAWeightAveraging
from rows import Row, figure, over, ratio, row, rows_of, target
from settings import SEED, Settings
from timing import Turn, in_turns, timed
from torch.utils.data import DataLoader

import lightning_tricks as lt

NAME = "checkpoints"
PEERS = ("timm",)
OURS, LIGHTNING = "lightning_tricks EMA", "Lightning EMAWeightAveraging"
OVER = "lightning_tricks EMA over Lightning's averaging"
CALLBACKS: dict[str, Callbacks] = {
    PLAIN: empty,
    OURS: lambda: [lt.EMA()],
    LIGHTNING: lambda: [EMAWeightAveraging(decay=0.999)],
}


def trained(name: str, callbacks: Callbacks, device: str, resume: Path | None = None) -> L.Trainer:
    """A Trainer after two steps, or one that takes up a checkpoint of them and has nothing left to do."""
    torch.manual_seed(SEED)
    shape = (32, 32) if name == "tiny" else (2, 3, 64, 64)
    network = tiny() if name == "tiny" else architecture(name)
    trainer = L.Trainer(accelerator=device, max_steps=2, callbacks=callbacks(), **QUIET)
    loader = DataLoader([drawn(shape, 4, device)] * 2, batch_size=None)
    trainer.fit(AdamNet(network), loader, ckpt_path=resume, weights_only=False if resume else None)
    return trainer


def turn(what: str, name: str, device: str, folder: Path) -> Turn:
    """Saving, and a fit that resumes, with all that a fit begins and ends with."""
    path = folder / f"{what}.ckpt"
    trainer = trained(name, CALLBACKS[what], device)
    works = {
        f"save, {what}": lambda: trainer.save_checkpoint(path),
        f"resume, {what}": lambda: trained(name, CALLBACKS[what], device, path),
    }
    return {key: timed(work, device) for key, work in works.items()}


def run(settings: Settings) -> list[Row]:
    """All figures."""
    name = settings.pick("network", "resnet18", "resnet18", "tiny")
    rounds = settings.pick("rounds", 10, 2, 1)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        makers = {what: lambda what=what: turn(what, name, settings.device, folder) for what in CALLBACKS}
        measured = in_turns(makers, rounds, warm_up=0)
        sizes = {path.stem: path.stat().st_size / 1e6 for path in sorted(folder.glob("*.ckpt"))}
    found = [row(f"size, {name}", what, [size], "MB") for what, size in sizes.items()]
    for way in ("save", "resume"):
        of_way = measured._replace(times={k: t for k, t in measured.times.items() if k.startswith(way)})
        found += rows_of(f"{way}, {name}", of_way, f"{way}, {PLAIN}", "ms")
        rounds = [measured.times.get(f"{way}, {what}") for what in (OURS, LIGHTNING)]
        if all(rounds):  # within a round, since the load of the disk drifts
            found.append(row(OVER, f"{way}, {name}", [over(*rounds)], "ratio"))
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """No larger and no slower than Lightning's averaging."""
    name = rows[0].case.split(", ")[1]
    size = ratio(*(figure(rows, f"size, {name}", what) for what in (OURS, LIGHTNING)))
    found = [target("MB over Lightning's averaging", size, "<=", 1.01)]
    for way in ("save", "resume"):
        slower = figure(rows, OVER, f"{way}, {name}")
        found.append(target(f"{way}: over Lightning's averaging", slower, "<=", 1.1))
    return found
