"""Fits of a stock Trainer, the batch lying ready, that tell the time of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from settings import SEED
from timing import Timed
from torch import Tensor, nn
from torch.utils.data import DataLoader

Batch = tuple[Tensor, Tensor]
Callbacks = Callable[[], Sequence[Callback]]
PLAIN = "plain"
QUIET: dict[str, Any] = {
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(L.LightningModule):
    """A network with the loss and the optimizer of any classifier."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class AdamNet(Net):
    """With Adam's state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tiny() -> nn.Module:
    """So small that what counts is what surrounds it."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def architecture(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, **options)


SETS: dict[str, Callable[[], nn.Module]] = {
    "200 x 64": lambda: nn.ParameterList([torch.randn(64) for _ in range(200)]),
    "vit_tiny": lambda: architecture("vit_tiny_patch16_224"),
    "resnet50": lambda: architecture("resnet50"),
}
SMALL = ("200 x 64",)


def drawn(shape: tuple[int, ...], classes: int, device: str) -> Batch:
    """Inputs and labels."""
    return torch.randn(shape, device=device), torch.randint(classes, shape[:1], device=device)


class Laps(Callback):
    """Notes the time every ``every`` batches, when the device has done its work."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        if batch_idx % self.every == 0:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter() * 1e6)

    def step(self) -> float:
        """Microseconds of a step; the first lap warms up."""
        return median(after - before for before, after in pairwise(self.marks[1:])) / self.every


def fit(
    module: L.LightningModule,
    batch: Batch,
    steps: int,
    callbacks: Sequence[Callback] = (),
    *,
    every: int = 20,
    **settings: Any,
) -> float:
    """Microseconds of a training step on the batch's device."""
    laps = Laps(every)
    trainer = L.Trainer(accelerator=batch[0].device.type, callbacks=[laps, *callbacks], **{**QUIET, **settings})
    trainer.fit(module, DataLoader([batch] * steps, batch_size=None))
    return laps.step()


def tiny_fits(contenders: Mapping[str, Callbacks], steps: int, device: str) -> dict[str, Timed]:
    """Fits of the tiny network with these callbacks."""
    batch = drawn((32, 32), 4, device)

    def step(callbacks: Callbacks) -> float:
        torch.manual_seed(SEED)
        return fit(Net(tiny()), batch, steps, callbacks())

    return {name: partial(step, callbacks) for name, callbacks in contenders.items()}


def empty() -> list[Callback]:
    """None: a stock Trainer."""
    return []
