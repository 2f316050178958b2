"""The experiment of the demo: handwritten digits, a stock Trainer, plain and with three more lines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightning_tricks as lt

SPLIT = (900, 300)  # training and validation images; the other 597 are for the test
VARIANTS = {  # the tricks of each row of the table
    "plain": (),
    "flat_cos": ("flat_cos",),
    "EMA": ("EMA",),
    "SAM": ("SAM",),
    "SAM + EMA + flat_cos": ("SAM", "EMA", "flat_cos"),
}


def network() -> nn.Sequential:
    """The network itself, without Lightning."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


class Digits(pl.LightningModule):
    """Ordinary training of the network."""

    def __init__(self, schedule: bool = False) -> None:
        super().__init__()
        self.network = network()
        self.schedule = schedule

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_accuracy", accuracy(self.network, *batch), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return lt.flat_cos(optimizer, self, warmup=0.05) if self.schedule else optimizer


class SharpDigits(lt.SAMMixin, Digits):
    """The same with sharpness-aware minimization."""

    sam = lt.SAM(rho=0.3)


class DigitsData(pl.LightningDataModule):
    """The digits for a configuration file."""

    def __init__(self, noise: float = 0.0, batch_size: int = 64) -> None:
        super().__init__()
        self.noise = noise
        self.batch_size = batch_size

    @override
    def setup(self, stage: str) -> None:
        self.data = {part: TensorDataset(*tensors) for part, tensors in load_digits(self.noise).items()}

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data["train"], self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data["val"], batch_size=300)


class Curves(Callback):
    """Validation accuracy by epoch, as logged and of the raw weights."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.logged: list[float] = []
        self.raw: list[float] = []

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Digits)
        self.logged.append(round(trainer.callback_metrics["val_accuracy"].item(), 4))
        self.raw.append(round(accuracy(pl_module.network, self.images, self.labels).item(), 4))


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Share of the images whose highest logit is their label's."""
    return (net(images).argmax(-1) == labels).float().mean()


def load_digits(noise: float) -> dict[str, tuple[Tensor, Tensor]]:
    """The digits split into train, val and test; a share ``noise`` of the training labels is another class."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ImportError("the demo needs scikit-learn: pip install 'lightning_tricks[demo]'") from error
    images, labels = load(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    train, val, test = (slice(0, SPLIT[0]), slice(SPLIT[0], sum(SPLIT)), slice(sum(SPLIT), None))
    wrong = torch.rand(SPLIT[0], generator=generator) < noise
    others = (y[train] + torch.randint(1, 10, (SPLIT[0],), generator=generator)) % 10
    return {
        "train": (x[train], torch.where(wrong, others, y[train])),
        "val": (x[val], y[val]),
        "test": (x[test], y[test]),
    }


def run(
    tricks: tuple[str, ...], seed: int, *, epochs: int, noise: float, checkpoint: Path | None = None
) -> dict[str, Any]:
    """One fit by a stock Trainer; with tricks, three lines differ."""
    data = load_digits(noise)
    pl.seed_everything(seed, verbose=False)
    module = (SharpDigits if "SAM" in tricks else Digits)(schedule="flat_cos" in tricks)
    curves = Curves(*data["val"])
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[*([lt.EMA()] if "EMA" in tricks else []), curves],
    )
    start = time.perf_counter()
    # lists of (image, label): as good as a Dataset and quicker to index than a TensorDataset
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
