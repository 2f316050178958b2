"""SAM against wrong labels: handwritten digits, a stock Trainer, several seeds, every variant to the last epoch.

Run ``python benchmarks/sam_digits.py`` (some ten minutes); it prints a table and writes
``benchmarks/results/sam_digits.json``. The 900 training images with their wrong labels, and the 897 test images with
their true ones, are the same for all; the seed draws the initial weights and the order of the batches. No value was
chosen by these results. A variant's radius is used as it is, also where only every second step is perturbed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from machine import machine, table
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.cli.demo import small_runs
from lightning_tricks.cli.digits import accuracy, load_digits, network

OUTPUT = Path(__file__).parent / "results" / "sam_digits.json"
SEEDS, EPOCHS, NOISE = 5, 60, 0.4
BATCH, LR, MOMENTUM, WEIGHT_DECAY = 64, 0.1, 0.9, 1e-4
SGD, EQUAL, SAM, MICRO = "SGD", "SGD, twice the epochs", "SAM rho .5", "SAM rho .5, micro-batches of 16"
EVERY_2, EVERY_2_RESCALED = "SAM rho .5, every 2 steps", "SAM rho 1, every 2 steps"
POINTS = "points of SAM with micro-batches over SGD at equal compute"


class Variant(NamedTuple):
    """What differs from one row of the table to the next."""

    sam: lt.SAM | None = None
    epochs: int = 1  # times EPOCHS


VARIANTS = {
    SGD: Variant(),
    EQUAL: Variant(epochs=2),
    SAM: Variant(lt.SAM(rho=0.5)),
    MICRO: Variant(lt.SAM(rho=0.5, micro_batch_size=16)),
    "ASAM rho 1.5": Variant(lt.SAM(rho=1.5, adaptive=True, eta=0.01)),
    EVERY_2: Variant(lt.SAM(rho=0.5, every_n_steps=2)),
    EVERY_2_RESCALED: Variant(lt.SAM(rho=1.0, every_n_steps=2)),
    "SAM rho 1": Variant(lt.SAM(rho=1.0)),
}
SETTINGS = {"noisy labels": (NOISE, list(VARIANTS)), "clean labels": (0.0, [SGD, SAM])}


class Net(pl.LightningModule):
    """The demo's network with this experiment's optimizer and schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        return lt.cosine(optimizer, self)


class SharpNet(lt.SAMMixin, Net):
    """The same with sharpness-aware minimization."""

    def __init__(self, sam: lt.SAM) -> None:
        super().__init__()
        self.sam = sam


def run(job: tuple[str, str, int], epochs: int) -> dict[str, float]:
    """One fit: test accuracy at its end, and its time."""
    labels, name, seed = job
    variant = VARIANTS[name]
    data = load_digits(SETTINGS[labels][0])
    test = [torch.cat(parts) for parts in zip(data["val"], data["test"], strict=True)]  # nothing is validated
    with small_runs():  # of one thread
        pl.seed_everything(seed, verbose=False)
        module = Net() if variant.sam is None else SharpNet(variant.sam)
        trainer = pl.Trainer(
            max_epochs=epochs * variant.epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = DataLoader(list(zip(*data["train"], strict=True)), batch_size=BATCH, shuffle=True)
        begin = time.perf_counter()
        trainer.fit(module, loader)
    seconds = round(time.perf_counter() - begin, 1)
    return {"accuracy": round(accuracy(module.network, *test).item(), 4), "seconds": seconds}


def summary(runs: Iterable[dict[str, float]]) -> dict[str, Any]:
    """The row of a variant."""
    accuracies, seconds = zip(*[(run["accuracy"], run["seconds"]) for run in runs], strict=True)
    spread = stdev(accuracies) if len(accuracies) > 1 else 0.0
    return {
        "mean": round(fmean(accuracies), 4),
        "std": round(spread, 4),
        "mean_seconds": round(fmean(seconds), 1),
        "accuracies": list(accuracies),
        "seconds": list(seconds),
    }


def targets(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What came out, what was aimed at, and whether it was reached."""
    rows = result["noisy labels"]
    points = round(100 * (rows[MICRO]["mean"] - rows[EQUAL]["mean"]), 1)
    return {POINTS: {"value": points, "target": ">= 20", "met": points >= 20}}


def measure(seeds: int, epochs: int, processes: int) -> dict[str, Any]:
    """All runs, in so many processes of one thread each, seed by seed."""
    jobs = [(labels, name, n) for n in range(seeds) for labels, (_, names) in SETTINGS.items() for name in names]
    done: dict[tuple[str, str, int], dict[str, float]] = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for job, outcome in zip(jobs, pool.map(partial(run, epochs=epochs), jobs), strict=True):
            done[job] = outcome
            print(*job, outcome, flush=True)
    settings = {
        "seeds": list(range(seeds)),
        "epochs": epochs,
        "noise": NOISE,
        "batch": BATCH,
        "lr": LR,
        "momentum": MOMENTUM,
        "weight_decay": WEIGHT_DECAY,
        "processes": processes,
        "threads": 1,
    }
    result: dict[str, Any] = {"machine": machine("scikit-learn", "lightning-tricks"), "settings": settings}
    for labels, (_, names) in SETTINGS.items():
        result[labels] = {name: summary(done[labels, name, seed] for seed in range(seeds)) for name in names}
        means = {"test accuracy": "mean", "std": "std", "seconds": "mean_seconds"}
        shown = {name: {title: row[key] for title, key in means.items()} for name, row in result[labels].items()}
        table(labels, shown)
    result["targets"] = targets(result)
    table("targets", result["targets"])
    return result


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed and one epoch: whether it runs")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the figures go")
    args = parser.parse_args()
    seeds, epochs = (1, 1) if args.quick else (args.seeds, EPOCHS)
    result = measure(seeds, epochs, args.processes)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
