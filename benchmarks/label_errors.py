"""How well ``LabelErrors`` finds wrong labels: the digits of scikit-learn, of which some have one, mean of 5 seeds.

Run it with ``python benchmarks/label_errors.py``; it writes ``benchmarks/results/label_errors.json`` in three minutes.
At the true share of wrong labels precision and recall are one number. The other suspects are those with a mean margin
below 0, for which nobody needs to know the share. "loss" ranks by the mean loss, "last loss" by that of the last epoch,
as one would after training.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from machine import machine
from rows import written
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.examples.digits import Digits
from lightning_tricks.examples.tasks import QUIET, mislabel
from lightning_tricks_cli.runs.demo import small_runs

SEEDS, SHARES, EPOCHS, BATCH = range(5), (0.1, 0.4), (10, 30), 64
OUTPUT = Path(__file__).parent / "results" / "label_errors.json"


def found(images: Tensor, labels: Tensor, epochs: int, seed: int) -> list[lt.LabelErrors]:
    """What was found in all epochs, and in the last one alone."""
    callbacks = [lt.LabelErrors(), lt.LabelErrors(start=1 - 1 / epochs)]
    for callback in callbacks:
        L.seed_everything(seed, verbose=False)
        loader = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True)
        trainer = L.Trainer(max_epochs=epochs, callbacks=[callback], limit_val_batches=0, **QUIET)
        trainer.fit(Digits(), loader)
    return callbacks


def precision_and_recall(suspects: Sequence[int], wrong: Tensor) -> tuple[float, float]:
    hits = int(wrong[list(suspects)].sum())
    return hits / max(len(suspects), 1), hits / int(wrong.sum())


def measured(images: Tensor, labels: Tensor, share: float, epochs: int) -> dict[str, Any]:
    """A row: means and standard deviations over the seeds."""
    values: dict[str, list[float]] = {}
    for seed in SEEDS:
        noisy = mislabel(labels, share, classes=10, generator=torch.Generator().manual_seed(seed))
        wrong = noisy != labels
        whole, last = (callback.report for callback in found(images, noisy, epochs, seed))
        count = int(wrong.sum())
        values.setdefault("margin", []).append(precision_and_recall(whole.suspects(count / len(labels)), wrong)[0])
        for name, report in (("loss", whole), ("last loss", last)):
            worst = (-report.loss).argsort(stable=True)[:count].tolist()
            values.setdefault(name, []).append(precision_and_recall(worst, wrong)[0])
        for name, value in zip(("precision", "recall"), precision_and_recall(whole.suspects(), wrong), strict=True):
            values.setdefault(f"{name} below 0", []).append(value)
    means = {name: round(statistics.fmean(found), 3) for name, found in values.items()}
    return {"wrong": share, "epochs": epochs, **means, "std": round(statistics.stdev(values["margin"]), 3)}


def main() -> None:
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    rows = []
    with small_runs():
        for share in SHARES:
            for epochs in EPOCHS:
                rows.append(measured(images.float() / 16, labels, share, epochs))
                print(rows[-1], flush=True)
    settings = {"seeds": list(SEEDS), "batch": BATCH, "samples": len(labels)}
    result = {"benchmark": "label_errors", "machine": machine("scikit-learn"), "settings": settings, "rows": rows}
    OUTPUT.write_text(written(result))


if __name__ == "__main__":
    main()
