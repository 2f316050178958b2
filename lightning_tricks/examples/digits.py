"""The demo experiment: handwritten digits with a stock Trainer, without and with three tricks."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

import lightning_tricks as lt
from lightning_tricks.core.install import required
from lightning_tricks.examples.tasks import QUIET, Classifier, Split, TaskData, accuracy, mislabel

SPLIT = (900, 300)  # Training and validation images; the other 597 are test images.
LR = 0.03  # Of the demo: the best one for plain training with 40% wrong labels, as benchmarks/quality.py has found.
VARIANTS = {  # The tricks of each row in the demo's table.
    "plain": (),
    "flat_cos": ("flat_cos",),
    "EMA": ("EMA",),
    "SAM": ("SAM",),
    "SAM + EMA + flat_cos": ("SAM", "EMA", "flat_cos"),
}


def network() -> nn.Sequential:
    """A perceptron with two hidden layers, from 64 pixels to 10 logits."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


class Digits(Classifier):
    """Ordinary training on the digits.

    Args:
        schedule: Whether the learning rate follows ``flat_cos``.
        lr: The learning rate of SGD with momentum.
    """

    def __init__(self, schedule: bool = False, lr: float = 0.1) -> None:
        super().__init__(network(), lr)
        self.schedule = schedule

    @override
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return lt.flat_cos(optimizer, self) if self.schedule else optimizer


class SharpDigits(lt.SAMMixin, Digits):
    """Training on the digits with sharpness-aware minimization."""

    sam = lt.SAM()


class DigitsData(TaskData):
    """The digits as a data module."""

    @override
    def load(self) -> Split:
        return load_digits(self.noise)


class Curves(Callback):
    """Records the validation accuracy of every epoch, as logged and with the raw weights."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.logged: list[float] = []
        self.raw: list[float] = []

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Digits)
        self.logged.append(round(trainer.callback_metrics["val_accuracy"].item(), 4))
        self.raw.append(round(accuracy(pl_module.network, self.images, self.labels).item(), 4))


def load_digits(noise: float) -> Split:
    """Split the digits into train, val and test; a fraction ``noise`` of the training labels is wrong."""
    images, labels = read_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    train, val, test = (slice(0, SPLIT[0]), slice(SPLIT[0], sum(SPLIT)), slice(sum(SPLIT), None))
    return {
        "train": (x[train], mislabel(y[train], noise, classes=10, generator=generator)),
        "val": (x[val], y[val]),
        "test": (x[test], y[test]),
    }


@cache
def read_digits() -> tuple[Any, Any]:
    """All digits, read once a process."""
    with required("the demo needs scikit-learn", "demo"):
        from sklearn.datasets import load_digits as load
    read: tuple[Any, Any] = load(return_X_y=True)
    return read


def run(
    tricks: tuple[str, ...], seed: int, *, epochs: int, noise: float, checkpoint: Path | None = None
) -> dict[str, Any]:
    """Fit with a stock Trainer and the given tricks; return accuracies and the seconds it took."""
    data = load_digits(noise)
    L.seed_everything(seed, verbose=False)
    module = (SharpDigits if "SAM" in tricks else Digits)(schedule="flat_cos" in tricks, lr=LR)
    curves = Curves(*data["val"])
    trainer = L.Trainer(max_epochs=epochs, **QUIET, callbacks=[*([lt.EMA()] if "EMA" in tricks else []), curves])
    start = time.perf_counter()
    # Lists of (image, label) pairs are faster to index than a TensorDataset.
    train, val = (list(zip(*data[part], strict=True)) for part in ("train", "val"))
    trainer.fit(
        module,
        DataLoader(train, batch_size=64, shuffle=True),  # type: ignore[arg-type]
        DataLoader(val, batch_size=300),  # type: ignore[arg-type]
    )
    seconds = time.perf_counter() - start
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint)
    return {
        "seed": seed,
        "test_accuracy": accuracy(module.network, *data["test"]).item(),
        "seconds": round(seconds, 2),
        "val_accuracy": curves.logged,
        "val_accuracy_raw": curves.raw,
    }
