"""What the tests of schedules share: a tiny module whose optimizer keeps the learning rates of its steps, and more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks.schedules import (
    constant,
    cosine,
    cosine_restarts,
    flat_cos,
    inverse_sqrt,
    linear,
    one_cycle,
    polynomial,
    step_decay,
    wsd,
)

FALLING = [cosine, cosine_restarts, flat_cos, linear, one_cycle, polynomial, step_decay, wsd]
FACTORIES = [constant, inverse_sqrt, *FALLING]


def optimizer(*lrs: Any, kind: Any = torch.optim.SGD, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer with a group of one weight for each learning rate; one group at 1.0 by default."""
    return kind([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs or (1.0,)], **settings)


def scheduler_of(schedule: dict[str, Any]) -> Any:
    return schedule["lr_scheduler"]["scheduler"]


def lrs_of(schedule: dict[str, Any], steps: int) -> list[list[float]]:
    """The learning rate of each group in each of the first steps."""
    taken = []
    for _ in range(steps):
        taken.append([float(group["lr"]) for group in schedule["optimizer"].param_groups])
        schedule["optimizer"].step()
        scheduler_of(schedule).step()
    return taken


class RecordingSGD(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lrs: list[float] = []  # of the first group, in the steps taken

    def step(self, closure: Any = None) -> Any:
        self.lrs.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


class Tiny(L.LightningModule):
    """One weight; ``schedule(optimizer, module)`` gives what configure_optimizers returns."""

    def __init__(self, schedule: Callable[..., Any] = lambda optimizer, module: optimizer, lr: float = 1.0) -> None:
        super().__init__()
        self.schedule, self.lr = schedule, lr
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum(self.layer(x).square().mean() for x in torch.utils._pytree.tree_leaves(batch) if x is not None)

    def configure_optimizers(self) -> Any:
        self.optimizer = RecordingSGD(self.parameters(), lr=self.lr)
        return self.schedule(self.optimizer, self)


def ones(batches: int, **settings: Any) -> DataLoader[tuple[Tensor, ...]]:
    """So many batches of one sample."""
    return DataLoader(TensorDataset(torch.full((batches, 1), 0.1)), **settings)


class SaveEveryStep(L.Callback):
    """Keeps a checkpoint of every optimizer step, ``N.ckpt``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        path = self.folder / f"{trainer.global_step}.ckpt"
        if trainer.global_step and not path.exists():
            trainer.save_checkpoint(path)
