"""Two encoders and a learned temperature, and the gradients that their optimizer gets."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.nets import build, trainer

SIZES = {"even": {1: [12], 2: [6, 6], 4: [3, 3, 3, 3]}, "uneven": {1: [12], 2: [5, 7], 4: [1, 5, 2, 4]}}
Gradients = dict[str, Tensor]


class Towers(L.LightningModule):
    """The loss of CLIP with its learned scale, as its users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
        self.b = nn.Linear(8, 5)
        self.log_scale = nn.Parameter(torch.tensor([1.5]))  # fully_shard takes no scalars

    def embed(self, batch: Any) -> Any:
        return F.normalize(self.a(batch[0]), dim=-1), F.normalize(self.b(batch[1]), dim=-1)

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        return lt.clip_loss(a, b, temperature=(-self.log_scale).exp())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.contrast(*self.embed(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneWay(Towers):
    """``info_nce``, in which the roles of the towers are not the same."""

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        return lt.info_nce(a, b, temperature=(-self.log_scale).exp())


def pairs(size: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 8, generator=generator)


class Kept(Callback):
    """The gradients of the steps, and what the steps returned."""

    def __init__(self) -> None:
        self.gradients: list[Gradients] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found.items()}
        self.gradients.append(whole)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def shares(batches: list[Any], kind: str) -> list[Any]:
    """This rank's part of each batch."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    sizes = SIZES[kind][world]
    return [tuple(part.split(sizes)[rank] for part in batch) for batch in batches]


def step(module: Any, batches: list[Any], **settings: Any) -> Kept:
    """What a fit of one epoch kept."""
    kept = Kept()
    settings["callbacks"] = [kept, *settings.get("callbacks", [])]
    fitted = trainer(max_epochs=1, use_distributed_sampler=False, **settings)
    L.seed_everything(7, verbose=False)
    fitted.fit(module, DataLoader(batches, batch_size=None))
    return kept


def on_ranks(kind: type[Towers], sizes: str, batches: int = 1, **settings: Any) -> tuple[list[Any], list[float]]:
    """The gradients of steps under DDP, and their losses."""
    world = int(os.environ["WORLD_SIZE"])
    every = shares([pairs(seed=seed) for seed in range(batches)], sizes)
    kept = step(build(kind), every, **{"strategy": "ddp", "devices": world, **settings})
    return [{name: g.numpy() for name, g in found.items()} for found in kept.gradients], kept.losses
