"""Which batch tricks help and which hurt: digits and textures, clean and wrong labels, a stock Trainer, several seeds.

Run ``python benchmarks/batch_quality.py`` (some ten minutes; needs scikit-learn and scikit-image); it prints tables and
writes ``benchmarks/results/batch_quality.json``. The digits are scikit-learn's (8x8, 10 classes). The textures are the
photographs brick, grass and gravel of scikit-image (512x512, grey) cut into 32x32 patches without overlap: the left
quarter of every photograph is for training, the second for validation, the right half for the test. With noisy labels
the same 40% of the training labels are another class in every run; validation and test labels are always true. The seed
draws the initial weights and the order of the batches. Every accuracy is that of the last epoch.

Plain training was tuned on the validation images with clean labels: LRS and EPOCHS are the best of the learning rates
0.03, 0.1 and 0.2 and of 30 and 60 epochs, by the mean over four seeds that are not used here; at 0.2 one of the four
diverged on the digits, so 0.1 is near what they bear. All variants keep them, with noisy labels too: whose labels are
wrong seldom knows it. Since stopping early is a cure as well, plain training also comes with an eighth, a quarter and
half of the epochs (its schedule ends with them), and "chosen on validation" compares the trick that validates best with
the plain training that does.

What HardExampleFilter saves is seen against plain training with as much computation: half the epochs have as many
images in their backward passes, 5/6 of them as many in forward and backward passes together (counting a backward pass
as two forward passes), and half the epochs of batches of 32 have the filter's steps with half of the images drawn at
random. "compute" is counted in the run, by a hook on the network, and relative to plain training.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from machine import machine, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.cli.demo import small_runs
from lightning_tricks.cli.digits import accuracy, load_digits

OUTPUT = Path(__file__).parent / "results" / "batch_quality.json"
SEEDS, NOISE = 5, 0.4
BATCH, MOMENTUM, WEIGHT_DECAY = 64, 0.9, 5e-4
LRS = {"digits": 0.1, "textures": 0.1}
EPOCHS = {"digits": 60, "textures": 60}
PATCH = 32
COLUMNS = {"train": slice(0, 4), "val": slice(4, 8), "test": slice(8, 16)}  # of patches, 16 in a photograph
LABELS = {"clean labels": 0.0, "noisy labels": NOISE}
CHOSEN, FILTERS = "chosen on validation", "filters at equal compute"

Data = dict[str, tuple[Tensor, Tensor]]
Trick = tuple[str, dict[str, Any]]  # the callback's name and settings


class Variant(NamedTuple):
    """What differs from one row of the table to the next."""

    tricks: tuple[Trick, ...] = ()
    smoothing: float = 0.0  # of the labels, by the loss itself
    epochs: float = 1.0  # times EPOCHS
    batch: int = BATCH


MIXUP: Trick = ("Mixup", {"alpha": 0.2})
CUTMIX: Trick = ("CutMix", {"alpha": 1.0})
PLAIN, HALF, FIVE_SIXTHS, RANDOM = "plain", "plain, 1/2 of the epochs", "plain, 5/6 of the epochs", "plain, random half"
PRUNE, LOSS = "HardExampleFilter(keep=0.5)", "HardExampleFilter(keep=0.5, mode='loss')"
VARIANTS = {
    PLAIN: Variant(),
    "plain, 1/8 of the epochs": Variant(epochs=1 / 8),
    "plain, 1/4 of the epochs": Variant(epochs=1 / 4),
    HALF: Variant(epochs=1 / 2),
    FIVE_SIXTHS: Variant(epochs=5 / 6),
    RANDOM: Variant(epochs=1 / 2, batch=BATCH // 2),
    "Mixup(alpha=0.2)": Variant((MIXUP,)),
    "Mixup(alpha=1.0, stop=0.8)": Variant((("Mixup", {"alpha": 1.0, "stop": 0.8}),)),
    "CutMix(alpha=1.0)": Variant((CUTMIX,)),
    "Mixup(alpha=0.2) and CutMix(alpha=1.0)": Variant((MIXUP, CUTMIX)),
    "label smoothing 0.1": Variant(smoothing=0.1),
    "Mixup(alpha=0.2), label smoothing 0.1": Variant((MIXUP,), smoothing=0.1),
    PRUNE: Variant((("HardExampleFilter", {"keep": 0.5}),)),
    LOSS: Variant((("HardExampleFilter", {"keep": 0.5, "mode": "loss"}),)),
}


class Job(NamedTuple):
    """One fit."""

    task: str
    labels: str
    name: str
    seed: int


def digits(noise: float) -> Data:
    """The digits of the demo, as pictures."""
    return {part: (images.reshape(-1, 1, 8, 8), labels) for part, (images, labels) in load_digits(noise).items()}


def textures(noise: float) -> Data:
    """Patches of three photographs, split by their place, standardized by the training patches."""
    from skimage import data

    photographs = torch.stack([torch.tensor(image()) for image in (data.brick, data.grass, data.gravel)]).float()
    patches = photographs.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # class, row, column, height, width
    train = patches[:, :, COLUMNS["train"]]
    patches = (patches - train.mean()) / train.std()
    parts = {part: patches[:, :, columns].flatten(1, 2) for part, columns in COLUMNS.items()}
    split = {
        part: (each.reshape(-1, 1, PATCH, PATCH), torch.arange(3).repeat_interleave(each.shape[1]))
        for part, each in parts.items()
    }
    return {**split, "train": (split["train"][0], mislabel(split["train"][1], noise))}


def mislabel(labels: Tensor, noise: float) -> Tensor:
    """A share ``noise`` of the labels of three classes is another class."""
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(labels), generator=generator) < noise
    others = (labels + torch.randint(1, 3, labels.shape, generator=generator)) % 3
    return torch.where(wrong, others, labels)


def digits_network() -> nn.Sequential:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def textures_network() -> nn.Sequential:
    """Three convolutions with BatchNorm and the mean over the picture."""
    return nn.Sequential(
        *(*convolution(1, 12), nn.MaxPool2d(2)),
        *(*convolution(12, 24), nn.MaxPool2d(2)),
        *(*convolution(24, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 3)),
    )


def convolution(channels: int, out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()


TASKS: dict[str, tuple[Callable[[float], Data], Callable[[], nn.Sequential]]] = {
    "digits": (digits, digits_network),
    "textures": (textures, textures_network),
}


class Net(pl.LightningModule):
    """An ordinary classifier that knows nothing of the tricks."""

    def __init__(self, network: nn.Module, lr: float, smoothing: float) -> None:
        super().__init__()
        self.network = network
        self.lr = lr
        self.smoothing = smoothing

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels, label_smoothing=self.smoothing)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        return lt.cosine(optimizer, self)


class Passes:
    """Counts the images that pass through a network, and those that do with gradients."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def __call__(self, network: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self.forward += len(output)
        self.backward += len(output) * output.requires_grad


def run(job: Job, epochs: dict[str, int]) -> dict[str, float]:
    """One fit: validation and test accuracy at its end, its time and the images that passed."""
    variant = VARIANTS[job.name]
    load, network = TASKS[job.task]
    data = load(LABELS[job.labels])
    passes = Passes()
    with small_runs():  # of one thread
        pl.seed_everything(job.seed, verbose=False)
        module = Net(network(), LRS[job.task], variant.smoothing)
        hook = module.network.register_forward_hook(passes)
        trainer = pl.Trainer(
            max_epochs=max(1, round(epochs[job.task] * variant.epochs)),
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[getattr(lt, name)(**settings) for name, settings in variant.tricks],
        )
        loader = DataLoader(list(zip(*data["train"], strict=True)), batch_size=variant.batch, shuffle=True)
        begin = time.perf_counter()
        trainer.fit(module, loader)
        seconds = round(time.perf_counter() - begin, 1)
        hook.remove()
        module.eval()
        val, test = (round(accuracy(module.network, *data[part]).item(), 4) for part in ("val", "test"))
    return {"val": val, "test": test, "seconds": seconds, "forward": passes.forward, "backward": passes.backward}


def cell(runs: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, Any]:
    """The figures of a variant, beside those of plain training with the same seeds."""
    figures = {key: [each[key] for each in runs] for key in runs[0]}
    gains = [each["test"] - other["test"] for each, other in zip(runs, plain, strict=True)]
    return {
        "val_mean": round(fmean(figures["val"]), 4),
        "test_mean": round(fmean(figures["test"]), 4),
        "test_std": round(pstdev(figures["test"]), 4),
        "mean_seconds": round(fmean(figures["seconds"]), 1),
        "compute": round(work(runs) / work(plain), 3),
        "points": round(100 * fmean(gains), 2),
        "seeds_better": sum(gain > 0 for gain in gains),
        "seeds_worse": sum(gain < 0 for gain in gains),
        **figures,
    }


def work(runs: list[dict[str, float]]) -> float:
    """Forward passes of an image, a backward pass being as long as two."""
    return sum(each["forward"] + 2 * each["backward"] for each in runs)


def chosen(rows: dict[str, Any]) -> dict[str, Any]:
    """The plain training and the trick that validate best, the first of equals, and the trick's points on the test."""
    plain, trick = (
        max((name for name in rows if is_plain(name) is wanted), key=lambda name: rows[name]["val_mean"])
        for wanted in (True, False)
    )
    return {
        "plain": plain,
        "plain_test": rows[plain]["test_mean"],
        "trick": trick,
        "trick_test": rows[trick]["test_mean"],
        "points": round(100 * (rows[trick]["test_mean"] - rows[plain]["test_mean"]), 2),
    }


def is_plain(name: str) -> bool:
    return not VARIANTS[name].tricks and not VARIANTS[name].smoothing


def filters(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Points of the filters above plain training with as many images, drawn otherwise, or as much computation."""
    return {
        name: {
            other: round(100 * (rows[name]["test_mean"] - rows[other]["test_mean"]), 2)
            for other in (PLAIN, FIVE_SIXTHS, HALF, RANDOM)
        }
        for name in (PRUNE, LOSS)
    }


def measure(seeds: int, epochs: dict[str, int], processes: int) -> dict[str, Any]:
    """All runs, in so many processes of one thread each, seed by seed."""
    jobs = [
        Job(task, labels, name, seed)
        for seed in range(seeds)
        for task in TASKS
        for labels in LABELS
        for name in VARIANTS
    ]
    done: dict[Job, dict[str, float]] = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for job, outcome in zip(jobs, pool.map(partial(run, epochs=epochs), jobs), strict=True):
            done[job] = outcome
            print(*job, outcome, flush=True)
    settings = {
        "seeds": list(range(seeds)),
        "epochs": epochs,
        "noise": NOISE,
        "batch": BATCH,
        "lrs": LRS,
        "momentum": MOMENTUM,
        "weight_decay": WEIGHT_DECAY,
        "images": {
            task: {part: len(each[1]) for part, each in load(NOISE).items()} for task, (load, _) in TASKS.items()
        },
        "processes": processes,
        "threads": 1,
    }
    result: dict[str, Any] = {
        "machine": machine("scikit-learn", "scikit-image", "lightning-tricks"),
        "settings": settings,
    }
    for task in TASKS:
        result[task] = {}
        for labels in LABELS:
            runs = {name: [done[Job(task, labels, name, seed)] for seed in range(seeds)] for name in VARIANTS}
            result[task][labels] = {name: cell(each, runs[PLAIN]) for name, each in runs.items()}
    result[CHOSEN] = over_settings(result, chosen)
    result[FILTERS] = over_settings(result, filters)
    show(result)
    return result


def over_settings(result: dict[str, Any], judge: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    return {f"{task}, {labels}": judge(result[task][labels]) for task in TASKS for labels in LABELS}


def show(result: dict[str, Any]) -> None:
    """Print the tables, accuracies in per cent."""
    for task in TASKS:
        for labels in LABELS:
            table(f"{task}, {labels}", {name: shown(row) for name, row in result[task][labels].items()})
    for setting, row in result[CHOSEN].items():
        print(f"\n{CHOSEN}: {setting}")
        print(f"  {row['plain']}: {percent(row['plain_test'])}; {row['trick']}: {percent(row['trick_test'])}")
    for setting, rows in result[FILTERS].items():
        print(f"\n{FILTERS}, points: {setting}")
        for name, row in rows.items():
            print(f"  {name}: " + "; ".join(f"{points:+.2f} over {other}" for other, points in row.items()))


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the printed table."""
    return {
        "val": percent(row["val_mean"]),
        "test": f"{percent(row['test_mean'])} +- {percent(row['test_std'])}",
        "points": f"{row['points']:+.2f}",
        "better/worse": f"{row['seeds_better']}/{row['seeds_worse']}",
        "compute": row["compute"],
        "seconds": row["mean_seconds"],
    }


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed and one epoch: whether it runs")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the figures go")
    args = parser.parse_args()
    seeds, epochs = (1, dict.fromkeys(EPOCHS, 1)) if args.quick else (args.seeds, EPOCHS)
    result = measure(seeds, epochs, args.processes)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
