"""Training on the glyphs, with and without tricks: what ``gpu/resnet18.py`` and ``gpu/vit_small.py`` share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from fit_curve import ValidationCurve
from glyphs import CHARACTERS, load_glyphs
from quality import Measured, Recipe, at_once
from quality_report import PLAIN
from rows import Row
from settings import Settings
from tables import RESULTS
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from tuned import EPOCHS, Budget, Trick, cost_rows, measure, shuffled

import lightning_tricks as lt
from lightning_tricks.examples.tasks import QUIET


class Size(NamedTuple):
    """The data and how they are read."""

    pixels: int
    train: int
    other: int  # pictures of validation, and as many of the test
    batch: int
    characters: str = CHARACTERS


class Plain(NamedTuple):
    """How the network is trained without tricks, but for its learning rate."""

    network: Callable[[], nn.Module]
    optimizer: str
    weight_decay: float
    lr: float  # where the choice begins


def cosine(*others: Any, **settings: Any) -> Recipe:
    """With the schedule that all have."""
    return Recipe((lt.LRSchedule("cosine", warmup=0.1), *others), **settings)


TRICKS: Mapping[str, Callable[[], Recipe]] = {
    PLAIN: cosine,
    "plain, twice the steps": lambda: cosine(epochs=2.0),
    "constant": Recipe,
    "EMA": lambda: cosine(lt.EMA()),
    "SAM": lambda: cosine(lt.SAMCallback()),
    "SAM, half the steps": lambda: cosine(lt.SAMCallback(), epochs=0.5),
    "Mixup": lambda: cosine(lt.Mixup()),
    "CutMix": lambda: cosine(lt.CutMix()),
    "label smoothing 0.1": lambda: cosine(smoothing=0.1),
    "Muon": lambda: cosine(optimizer="muon"),
}
OWN_RATES = {"Muon": 0.01}


class GlyphData(L.LightningDataModule):
    """The glyphs; a batch is indexed at once."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size

    def setup(self, stage: str) -> None:
        """The data, drawn once."""
        pixels, train, other, _, characters = self.size
        drawn = load_glyphs(pixels, train, other, characters)
        self.data = {part: TensorDataset(*tensors) for part, tensors in drawn.items()}

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches in a new order in every epoch."""
        sampler = shuffled(self.data["train"], self.size.batch, self.trainer)
        batches = BatchSampler(sampler, self.size.batch, drop_last=True)
        return DataLoader(self.data["train"], batch_size=None, sampler=batches)

    def val_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return at_once(self.data["val"])

    def test_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return at_once(self.data["test"])


def fit(
    plain: Plain, size: Size, device: str, recipe: Callable[[], Recipe], lr: float, steps: int, folder: Path
) -> tuple[Any, ...]:
    """An arm: Trainer, module and data."""
    made = recipe()
    options = {**QUIET, "accelerator": device, "precision": "bf16-mixed" if device == "cuda" else "32-true"}
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        limit_train_batches=max(1, steps // EPOCHS),
        check_val_every_n_epoch=1 if folder.name == "seed0" else EPOCHS + 1,  # ``compare`` validates after the fit
        callbacks=[ValidationCurve(folder), *made.callbacks],
        **options,
    )
    name = made.optimizer or plain.optimizer
    further = {**({"momentum": 0.9, "nesterov": True} if name == "sgd" else {}), **made.settings}
    settings: dict[str, Any] = {"lr": lr, "weight_decay": plain.weight_decay, "label_smoothing": made.smoothing}
    return trainer, Measured(plain.network(), len(size.characters), name, further, **settings), GlyphData(size)


def run(name: str, plain: Plain, size: Size, settings: Settings) -> list[Row]:
    """The rows of a benchmark; interrupted, the next call goes on."""
    steps, seeds, sweep = settings.pick("budget", (720, 3, 180), (EPOCHS, 2, 0), (EPOCHS, 2, 0))
    tricks = settings.pick("tricks", tuple(TRICKS), (PLAIN, "EMA", "SAM", "Mixup", "Muon"), (PLAIN, "EMA", "Muon"))
    settings.noted |= {"data": size._asdict(), **plain._replace(network=name)._asdict()}
    arm, rates = partial(fit, plain, size, settings.device), {**OWN_RATES, PLAIN: plain.lr, "constant": plain.lr}
    contenders = {trick: Trick(TRICKS[trick], rates.get(trick)).contender(arm) for trick in tricks}
    folder = RESULTS / "scratch" / f"{name}, {settings.effort}, {settings.device}"
    folder.mkdir(parents=True, exist_ok=True)
    made = measure(contenders, Budget(steps, seeds, sweep), folder, metric="accuracy", device=settings.device)
    settings.noted["learning rates"] = made["sweep"]
    shutil.rmtree(folder)
    return cost_rows(made, "accuracy")
