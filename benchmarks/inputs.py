"""Whether inputs that grow save time: pixels, words and seconds to an accuracy, with and without, 5 seeds.

Run it with ``python benchmarks/inputs.py``; it writes ``benchmarks/results/inputs.json`` in two minutes. The
accuracy to be reached is one point below the median of what plain runs end with, on the validation data. Seconds are
those of the processor in training, without validation and without other work on the machine; the variants of a seed
are run one after the other, and ratios are of runs of one seed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from machine import lent, prepare
from rows import written
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.examples import glosses, textures
from lightning_tricks.examples.tasks import QUIET, Classifier, Split, accuracy
from lightning_tricks_cli.runs.demo import small_runs

SEEDS, PLAIN = range(5), "plain"
OUTPUT = Path(__file__).parent / "results" / "inputs.json"


class Task(NamedTuple):
    """A task, its training, and the variants to compare."""

    load: Callable[[float], Split]
    network: Callable[[], nn.Module]
    settings: dict[str, Any]  # of the Classifier
    epochs: int
    batch: int
    every: int  # steps between validations
    unit: str
    variants: dict[str, Callable[[], Callback]]


TASKS = {
    "textures": Task(
        *(textures.load_textures, textures.network, {"lr": 0.1, "weight_decay": 5e-4}, 60, 32, 6, "million pixels"),
        {
            "ProgressiveResizing(0.5)": lambda: lt.ProgressiveResizing(0.5, multiple_of=4),
            'ProgressiveResizing(0.5, mode="crop")': lambda: lt.ProgressiveResizing(0.5, multiple_of=4, mode="crop"),
        },
    ),
    "glosses": Task(
        *(glosses.load_glosses, glosses.GlossTransformer),
        *({"lr": 0.01, "optimizer": "adamw", "weight_decay": 0.01}, 6, 64, 8, "million words"),
        {
            "SequenceLengthWarmup(0.25)": lambda: lt.SequenceLengthWarmup(0.25, multiple_of=2),
            "SequenceLengthWarmup(0.25, stop=0.8)": lambda: lt.SequenceLengthWarmup(0.25, stop=0.8, multiple_of=2),
        },
    ),
}


class Course(Callback):
    """Notes the seconds and the entries of inputs that training took until each validation, and its accuracy."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float, float]] = []
        self.seconds = self.millions = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start the clock."""
        self.since = time.process_time()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the inputs."""
        self.millions += batch[0].numel() / 1e6

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Stop the clock."""
        self.seconds += time.process_time() - self.since

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Note the accuracy, and start the clock again."""
        self.points.append((self.seconds, self.millions, trainer.callback_metrics["val_accuracy"].item()))
        self.since = time.process_time()


class Ended(NamedTuple):
    """The course of a run, and its accuracy on the test data."""

    points: Sequence[tuple[float, float, float]]
    accuracy: float

    def to(self, target: float) -> tuple[float, float] | None:
        """The seconds and millions of entries until the accuracy was reached; None if it never was."""
        return next(((seconds, millions) for seconds, millions, found in self.points if found >= target), None)


def fitted(task: Task, data: Split, variant: Callable[[], Callback] | None, seed: int) -> Ended:
    L.seed_everything(seed, verbose=False)
    module, course = Classifier(task.network(), **task.settings), Course()
    train, val = (TensorDataset(*data[part]) for part in ("train", "val"))
    callbacks = [lt.LRSchedule("flat_cos", warmup=0.05), course, *([variant()] if variant else [])]
    run = L.Trainer(max_epochs=task.epochs, val_check_interval=task.every, callbacks=callbacks, **QUIET)
    run.fit(module, DataLoader(train, task.batch, shuffle=True, drop_last=True), DataLoader(val, 500))
    return Ended(course.points, accuracy(module.network.eval(), *data["test"]).item())


def compared(name: str, task: Task, found: dict[str, list[Ended]]) -> list[dict[str, Any]]:
    """A row for each variant."""
    target = statistics.median(run.points[-1][2] for run in found[PLAIN]) - 0.01
    rows = []
    for variant, runs in found.items():
        reached = [run.to(target) for run in runs]
        both = [(a, b) for a, b in zip(reached, (run.to(target) for run in found[PLAIN]), strict=True) if a and b]
        ended = list(zip(runs, found[PLAIN], strict=True))
        accuracies = [run.accuracy for run in runs]
        rows.append(
            {
                "task": name,
                "variant": variant,
                "target": round(target, 4),
                "reached": f"{sum(each is not None for each in reached)} of {len(runs)}",
                "seconds_to_target": middle([each[0] for each in reached if each]),
                "unit": task.unit,
                "inputs_to_target": middle([each[1] for each in reached if each]),
                "seconds_over_plain": middle([a[0] / b[0] for a, b in both]),
                "inputs_over_plain": middle([a[1] / b[1] for a, b in both]),
                "all_seconds_over_plain": middle([run.points[-1][0] / own.points[-1][0] for run, own in ended]),
                "all_inputs_over_plain": middle([run.points[-1][1] / own.points[-1][1] for run, own in ended]),
                "test_accuracy": round(statistics.fmean(accuracies), 4),
                "std": round(statistics.stdev(accuracies), 4),
                "seeds_better": sum(run.accuracy > own.accuracy for run, own in ended),
            }
        )
    return rows


def middle(values: Sequence[float]) -> list[float] | None:
    """The median, the least and the most; None of none."""
    return [round(each, 3) for each in (statistics.median(values), min(values), max(values))] if values else None


def main() -> None:
    torch.set_num_threads(1)
    prepare(())
    rows: list[dict[str, Any]] = []
    with small_runs():
        for name, task in TASKS.items():
            data, variants = task.load(0.0), {PLAIN: None, **task.variants}
            fitted(task._replace(epochs=1), data, None, seed=100)  # to warm up
            found: dict[str, list[Ended]] = {variant: [] for variant in variants}
            for seed in SEEDS:
                for variant, make in variants.items():
                    found[variant].append(fitted(task, data, make, seed))
            rows += compared(name, task, found)
            for row in rows[-len(variants) :]:
                print(row, flush=True)
    settings = {"seeds": list(SEEDS), "epochs": {name: task.epochs for name, task in TASKS.items()}}
    result = {"benchmark": "inputs", "machine": lent("cpu", "timm", "scikit-image"), "settings": settings, "rows": rows}
    OUTPUT.write_text(written(result))


if __name__ == "__main__":
    main()
