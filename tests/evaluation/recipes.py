"""What the tests cross-validate: makers at the top of a module, which pickle, and the same folds made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from sklearn.model_selection import KFold
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_tricks.evaluation import CrossValidation, cross_validate
from tests.nets import Net, data, quiet

DATA = data(44)
TARGETS = DATA.tensors[1]


class Scored(Net):
    """A module with a metric that all ranks agree on."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("loss", torch.nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("accuracy", (logits.argmax(-1) == y).float().mean(), sync_dist=True)


def make_module(fold: int) -> L.LightningModule:
    return Scored()


def make_trainer(fold: int, folder: Path, **settings: Any) -> L.Trainer:
    best = ModelCheckpoint(folder, monitor="accuracy", mode="max")
    callbacks = [best, *settings.pop("callbacks", [])]
    return L.Trainer(**{**quiet, "enable_checkpointing": True, "callbacks": callbacks, **settings})


def make_loader(subset: Any, train: bool) -> DataLoader[Any]:
    return DataLoader(subset, 8, shuffle=train)


def run(folder: Path, **changes: Any) -> CrossValidation:
    arguments: dict[str, Any] = {
        "make_module": make_module,
        "dataset": DATA,
        "make_trainer": make_trainer,
        "splitter": 3,
        "loader": make_loader,
        "folder": folder,
    }
    return cross_validate(**{**arguments, **changes})


def by_hand(folder: Path, seed: int = 0) -> tuple[list[dict[str, float]], Tensor]:
    """The metrics and predictions of ``run``, in a plain loop."""
    rows, predictions = [], torch.full((len(DATA), 2), torch.nan)
    for k, (train, validation) in enumerate(KFold(3, shuffle=True, random_state=seed).split(range(len(DATA)))):
        L.seed_everything(seed + k, workers=True, verbose=False)
        module, trainer = make_module(k), make_trainer(k, folder / str(k))
        inside, outside = make_loader(Subset(DATA, train.tolist()), True), make_loader(Subset(DATA, validation), False)
        trainer.fit(module, inside, outside)
        best = trainer.checkpoint_callback.best_model_path
        rows.append(dict(trainer.validate(module, outside, ckpt_path=best, verbose=False, weights_only=False)[0]))
        module.eval()
        with torch.no_grad():
            predictions[validation] = module(DATA.tensors[0][validation])
    return rows, predictions


class Fails(Callback):
    """Raises at an optimizer step, as a process that dies."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("died")


def failing(fold: int, folder: Path, number: int = 1) -> L.Trainer:
    return make_trainer(fold, folder, callbacks=[Fails(5)] if fold == number else [])


def same(one: CrossValidation, other: CrossValidation) -> bool:
    return (
        one.table() == other.table()
        and one.metrics == other.metrics
        and torch.equal(one.predictions, other.predictions)
    )
