"""What the code of cards and pages takes as given; without pytest, so that it is there beside the wheel alone."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from tests.nets import PlainNet, data

TEXTS = [torch.randint(1, 100, (length,)) for length in (3, 9, 4, 12) * 8]


class Model(nn.Module):
    """What the head of docs/tricks/README.md says: a stem, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((-2, -1)))


class Net(L.LightningModule):
    """A stock module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def of_cards() -> dict[str, Any]:
    """What the cards take as given; a Trainer of theirs is short and quiet."""
    short: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "accelerator": "cpu"}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning = SimpleNamespace(**vars(L))
    lightning.Trainer = lambda **given: L.Trainer(**{**short, **quiet, **given})
    data = TensorDataset(torch.randn(16, 3, 16, 16), torch.arange(16) % 2)
    loader = DataLoader(data, batch_size=8)
    given = {"L": lightning, "lt": lt, "torch": torch, "nn": nn, "F": F, "DataLoader": DataLoader}
    mine = {"Net": Net, "net": Net(), "data": data, "loader": loader, "batch": next(iter(loader))}
    mine |= dict.fromkeys(("train_loader", "val_loader", "test_loader"), loader)
    return {**given, **mine, "texts": TEXTS, "padded": nn.utils.rnn.pad_sequence}


def of_pages() -> dict[str, Any]:
    """What the pages of docs/ take as given; a Trainer of theirs is on the CPU, and writes no logs."""
    here = partial(L.Trainer, accelerator="cpu", logger=False)
    yours = {"net": PlainNet(), "batch": data(4)[:], "loader": DataLoader(data(8), 4)}
    return {"lt": lt, "L": L, "Trainer": here, "torch": torch, **yours}
