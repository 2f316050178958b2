"""One rank of ``cost/ranks.py``: a fit of two steps with EMA, whose state's bytes go into a file of this rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from fitted import QUIET, AdamNet, drawn
from machine import prepare
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt

WIDTH = 512


class WideNet(AdamNet):
    """Linear layers that every number of ranks divides."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return lt.adamw(self, lr=1e-3)


class Held(L.Callback):
    """Reads the averages after the last step."""

    def __init__(self, ema: lt.EMA) -> None:
        self.ema = ema

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        (averages,) = self.ema.running().values()
        self.nbytes = sum(tensor.nbytes for tensor in averages.tensors.values())


def main(strategy: str, device: str, folder: str) -> None:
    """Fit and write."""
    prepare(())
    torch.manual_seed(0)
    module = WideNet(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)]))
    whole = sum(weight.nbytes for weight in module.parameters())
    ema = lt.EMA(warmup=False)
    held = Held(ema)
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    settings = {**QUIET, "devices": ranks, "strategy": strategy, "callbacks": [ema, held]}
    loader = DataLoader([tuple(each[0] for each in drawn((1, WIDTH), 4, "cpu"))] * 2 * ranks * 4, batch_size=4)
    L.Trainer(accelerator=device, max_steps=2, **settings).fit(module, loader)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(held.nbytes / whole))


if __name__ == "__main__":
    main(*sys.argv[1:])
