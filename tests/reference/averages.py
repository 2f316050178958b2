"""A naive exponential moving average: one tensor at a time, in fp64."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor


class NaiveEMA(Callback):
    """Average in fp64 of every parameter after every batch in which ``global_step`` moved; changes nothing."""

    def __init__(self, decay: float, warmup: bool | str = False, every: int = 1, start: int = 0) -> None:
        self.decay, self.warmup, self.every, self.start = decay, warmup, every, start
        self.average: dict[str, Tensor] = {}
        self.updates = self.steps = self.seen = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen = trainer.global_step
        if self.start == 0:
            self.begin(pl_module)

    def begin(self, pl_module: L.LightningModule) -> None:
        self.average = {name: p.detach().double().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.seen:
            return
        self.seen = trainer.global_step
        if not self.average:
            if trainer.global_step >= self.start:
                self.begin(pl_module)
            return
        self.steps += 1
        if self.steps % self.every:
            return
        d = self.decay**self.every
        if self.warmup == "power":
            d = min(d, 1 - 1 / (1 + self.updates) ** (2 / 3))
        elif self.warmup:
            d = min(d, (1 + self.updates) / (10 + self.updates))
        for name, p in pl_module.named_parameters():
            self.average[name] = d * self.average[name] + (1 - d) * p.detach().double()
        self.updates += 1

    def assert_equals(self, state_dict: dict[str, Tensor], tolerance: float = 1e-6) -> None:
        assert self.updates > 0
        for name, average in self.average.items():
            torch.testing.assert_close(state_dict[name].double(), average, atol=tolerance, rtol=tolerance)
