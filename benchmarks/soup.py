"""A soup of fine-tuned networks: the average of several trainings from the same weights, each in another order."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim.swa_utils import update_bn

import lightning_tricks as lt


class Soup(Callback):
    """Divides a fit into trainings that begin from the same weights, and ends with the average of their results."""

    def __init__(self, trainings: int) -> None:
        self.trainings = trainings

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the weights from which each training begins."""
        self._every = int(trainer.estimated_stepping_batches) // self.trainings
        self._initial = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        self._folder = TemporaryDirectory()
        self._files: list[Path] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """At the end of a training keep its weights; the next one begins as the first did."""
        if trainer.global_step % self._every or len(self._files) == self.trainings:
            return
        self._files.append(Path(self._folder.name) / f"{len(self._files)}.pt")
        torch.save(pl_module.state_dict(), self._files[-1])
        if len(self._files) < self.trainings:
            pl_module.load_state_dict(self._initial)
            for optimizer in trainer.optimizers:
                optimizer.state.clear()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Average, with the statistics of BatchNorm that the average has."""
        mean = Path(self._folder.name) / "mean.pt"
        lt.average_checkpoints(self._files, mean)
        pl_module.load_state_dict(torch.load(mean, weights_only=True))
        self._folder.cleanup()
        update_bn(trainer.train_dataloader, pl_module.network)  # no pass if there is none
