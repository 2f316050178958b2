"""How a fit went: points along it, in a file of the run, and what they are drawn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from timing import clock
from tuned import FINALS

CURVE = "curve.json"


class Curve(Callback):
    """Steps, seconds of ``clock`` so far, and a value, at some points of a fit."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CURVE

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin."""
        self._device = pl_module.device.type
        self._begin = clock(self._device)
        self._found: list[tuple[int, float, float]] = []

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found))

    def _add(self, trainer: L.Trainer, value: float) -> None:
        self._found.append((trainer.global_step, round(clock(self._device) - self._begin, 2), round(value, 4)))


class ValidationCurve(Curve):
    """The accuracy of every validation; that after the fit is no point."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add a point."""
        if trainer.state.fn == "fit":
            self._add(trainer, float(trainer.callback_metrics["val_accuracy"]))


class TrainingCurve(Curve):
    """The mean training loss of every fortieth of training."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin."""
        super().on_train_start(trainer, pl_module)
        self._sum, self._steps = torch.zeros((), device=pl_module.device), 0
        self._every = max(1, int(trainer.estimated_stepping_batches) // 40)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Add the loss; the device is waited for at a point alone."""
        self._sum += outputs["loss"].detach()
        self._steps += 1
        if self._steps == self._every:
            self._add(trainer, float(self._sum) / self._steps)
            self._sum, self._steps = torch.zeros_like(self._sum), 0


def curves(folder: Path) -> list[dict[str, Any]]:
    """The curves of the final runs that have points."""
    found = sorted((folder / FINALS).glob(f"*/seed*/{CURVE}"))
    return [
        {
            "trick": unquote(path.parent.parent.name),
            "seed": int(path.parent.name.removeprefix("seed")),
            "points": points,
        }
        for path in found
        if (points := json.loads(path.read_text()))
    ]
