"""Which tricks help and which hurt: three tasks, clean and wrong labels, a stock Trainer, five seeds.

Run ``python benchmarks/quality.py`` (minutes on four cores; ``--reduced`` runs everything in under two). The fits are
those of ``lightning_tricks.compare``: interrupted, they go on where they were, with these versions; finished, they
begin anew. The figures are written to ``benchmarks/results/quality.json``, and the tables of ``benchmarks/README.md``
renewed. The tasks are those of ``configs/``: digits (a perceptron), textures (a small CNN with BatchNorm), glosses (a
transformer block). With noisy labels the same 40% of the training labels are another class in every run; validation and
test labels are always true. The seed draws the initial weights and the order of the batches.
Every accuracy is that of the last epoch.

One rule of effort for all: what has a strength that depends on the task (SAM, Mixup, HiddenMixup, CutMix) gets two or
three values, the package's default among them, and the one that validates best is taken, the first of equals, for each
task and for clean and wrong labels apart; by the mean of two seeds that are not used again (``sweep`` in the file). For
plain training, a constant learning rate, that strength is the learning rate, and all tricks keep the one found for it.
The others (EMA, SWA, the schedules, the filter, AutoClip) run at the package's defaults, label smoothing, a reference,
at 0.1. Stopping early is a cure as well: plain training also comes with a quarter and half of the epochs.

"compute" is counted in the run by a hook on the network, a backward pass being as long as two forward passes, and is
relative to plain training. Plain training with 5/6 and twice the epochs is as expensive as the filter that prunes and
as SAM.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from machine import machine
from quality_report import PLAIN, Run, figures, renew, tables
from rows import written
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import lightning_tricks as lt
from lightning_tricks.examples import digits, glosses, textures
from lightning_tricks.examples.tasks import QUIET, Classifier, SharpClassifier, Split, TaskData
from lightning_tricks_cli.runs.demo import small_runs

RESULTS = Path(__file__).parent / "results"
NOISE = {"clean labels": 0.0, "noisy labels": 0.4}
SEEDS, SWEEP_SEEDS = tuple(range(5)), (100, 101)


class Task(NamedTuple):
    """Data, network, and how plain training goes."""

    load: Callable[[float], Split]
    network: Callable[[], nn.Module]
    epochs: int
    batch: int
    optimizer: str
    weight_decay: float
    lrs: tuple[float, ...]


class Recipe(NamedTuple):
    """What a trick changes in plain training."""

    callbacks: tuple[Callback, ...] = ()
    sam: lt.SAM | None = None
    smoothing: float = 0.0
    epochs: float = 1.0  # times the task's


class Trick(NamedTuple):
    """A row of the tables."""

    recipe: Callable[[Any], Recipe]  # of its strength
    values: tuple[float, ...] = ()  # strengths to choose from
    tasks: tuple[str, ...] = ("digits", "textures", "glosses")


class Variant(NamedTuple):
    """A trick with its strength ``value``; that of plain training, which has none, is ``lr``."""

    trick: str
    value: float | None
    lr: float

    def __str__(self) -> str:
        return f"{self.trick} | {self.value} | lr {self.lr}"


class Scale(NamedTuple):
    """How much is run."""

    seeds: tuple[int, ...] = SEEDS
    sweep_seeds: tuple[int, ...] = SWEEP_SEEDS
    epochs: int | None = None  # None: the task's
    batches: int | None = None  # of an epoch; None: all


REDUCED = Scale((0, 1), epochs=1, batches=2)


def digit_pictures(noise: float) -> Split:
    """The digits as pictures, which CutMix needs."""
    return {part: (images.reshape(-1, 1, 8, 8), labels) for part, (images, labels) in digits.load_digits(noise).items()}


TASKS = {
    "digits": Task(
        *(digit_pictures, lambda: nn.Sequential(nn.Flatten(), *digits.network())),
        *(30, 64, "sgd", 5e-4, (0.03, 0.1, 0.2)),
    ),
    "textures": Task(textures.load_textures, textures.network, 20, 32, "sgd", 5e-4, (0.03, 0.1, 0.3)),
    "glosses": Task(glosses.load_glosses, glosses.GlossTransformer, 5, 64, "adamw", 0.01, (0.003, 0.01, 0.03)),
}
ALL = "SAM + EMA + flat_cos"  # what the package's README recommends, with the radius of SAM alone
PICTURES, TEXTS = ("digits", "textures"), ("glosses",)
TRICKS = {
    PLAIN: Trick(lambda _: Recipe()),
    "plain, 1/4 of the epochs": Trick(lambda _: Recipe(epochs=1 / 4)),
    "plain, 1/2 of the epochs": Trick(lambda _: Recipe(epochs=1 / 2)),
    "plain, 5/6 of the epochs": Trick(lambda _: Recipe(epochs=5 / 6)),
    "plain, twice the epochs": Trick(lambda _: Recipe(epochs=2)),
    "label smoothing": Trick(lambda _: Recipe(smoothing=0.1)),
    "flat_cos": Trick(lambda _: Recipe((lt.LRSchedule("flat_cos", warmup=0.05),))),
    "one_cycle": Trick(lambda _: Recipe((lt.LRSchedule("one_cycle"),))),
    "EMA": Trick(lambda _: Recipe((lt.EMA(),))),
    "SWA": Trick(lambda _: Recipe((lt.SWA(),))),
    "SAM": Trick(lambda rho: Recipe(sam=lt.SAM(rho)), (0.05, 0.1, 0.3)),
    "Mixup": Trick(lambda alpha: Recipe((lt.Mixup(alpha),)), (0.2, 1.0), PICTURES),
    "CutMix": Trick(lambda prob: Recipe((lt.CutMix(prob=prob),)), (1.0, 0.5), PICTURES),
    "HiddenMixup": Trick(lambda alpha: Recipe((lt.HiddenMixup("network.head", alpha),)), (0.2, 1.0), TEXTS),
    "HardExampleFilter, prune": Trick(lambda _: Recipe((lt.HardExampleFilter(),))),
    "HardExampleFilter, loss": Trick(lambda _: Recipe((lt.HardExampleFilter(mode="loss"),))),
    "AutoClip": Trick(lambda _: Recipe((lt.AutoClip(),))),
    ALL: Trick(
        lambda rho: Recipe((lt.EMA(), lt.LRSchedule("flat_cos", warmup=0.05)), lt.SAM(rho)),
    ),
}
SETTINGS = [(task, labels) for task in TASKS for labels in NOISE]


class Passes(Callback):
    """Counts the samples that pass through the network in training, and those that do with gradients."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin."""

        def count(network: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if trainer.training:  # and not in the validation at the end
                self.forward += len(output)
                self.backward += len(output) * output.requires_grad

        pl_module.network.register_forward_hook(count)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Log the counts, beside the accuracy."""
        pl_module.log_dict({"forward": float(self.forward), "backward": float(self.backward)})


class Data(TaskData):
    """A task's data; a batch is indexed at once, which is quicker than sample by sample."""

    def __init__(self, task: str, labels: str) -> None:
        super().__init__(NOISE[labels], TASKS[task].batch)
        self.task, self.labels = task, labels

    def load(self) -> Split:
        """The data, read once a process."""
        return split(self.task, self.labels)

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches in a new order every epoch."""
        batches = BatchSampler(RandomSampler(self.data["train"]), self.batch_size, drop_last=False)
        return DataLoader(self.data["train"], batch_size=None, sampler=batches)


@cache
def split(task: str, labels: str) -> Split:
    """The data, read once a process."""
    return TASKS[task].load(NOISE[labels])


def fit(task: str, labels: str, variant: Variant, scale: Scale, folder: Path) -> tuple[Any, ...]:
    """An arm: Trainer, module and data."""
    recipe = TRICKS[variant.trick].recipe(variant.value)
    epochs = max(1, round((scale.epochs or TASKS[task].epochs) * recipe.epochs))
    trainer = pl.Trainer(
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        limit_train_batches=scale.batches,
        **QUIET,
        callbacks=[*recipe.callbacks, Passes()],
    )
    return trainer, classifier(TASKS[task], recipe, variant.lr), Data(task, labels)


def classifier(task: Task, recipe: Recipe, lr: float) -> Classifier:
    """The module: without SAM an ordinary one that knows nothing of the tricks."""
    settings: dict[str, Any] = {"optimizer": task.optimizer, "weight_decay": task.weight_decay}
    settings |= {"lr": lr, "label_smoothing": recipe.smoothing}
    if recipe.sam is None:
        return Classifier(task.network(), **settings)
    return SharpClassifier(task.network(), recipe.sam, **settings)


def measure(task: str, labels: str, scale: Scale, folder: Path) -> dict[str, list[Any]]:
    """The learning rate of plain training, the strengths of the tricks, then the runs that count."""
    setting, done = f"{task}, {labels}", dict[str, Run]()

    def made(variants: list[Variant], seeds: tuple[int, ...], part: str) -> dict[Variant, list[Run]]:
        arms = {str(variant): partial(fit, task, labels, variant, scale) for variant in variants}
        settings: dict[str, Any] = {"metric": "test_accuracy", "mode": "max", "seeds": seeds}
        with small_runs():  # of one thread
            runs = lt.compare(arms, folder=folder / setting / part, **settings).runs
        found = {variant: [run_of(run) for run in runs[str(variant)]] for variant in variants}
        for variant, each in found.items():
            done.update({f"{setting} | {variant} | seed {seed}": run for seed, run in zip(seeds, each, strict=True)})
        return found

    def best(variants: list[Variant], part: str) -> dict[str, dict[float, float]]:
        """The validation accuracy of each strength, by trick."""
        means: dict[str, dict[float, float]] = {}
        for variant, runs in made(variants, scale.sweep_seeds, part).items():
            strength = variant.lr if variant.value is None else variant.value
            means.setdefault(variant.trick, {})[strength] = round(fmean(run["val"] for run in runs), 4)
        return means

    tricks = {name: trick for name, trick in TRICKS.items() if task in trick.tasks}
    means = best([Variant(PLAIN, None, lr) for lr in TASKS[task].lrs], "learning rates")
    lr = first_best(means[PLAIN])
    means |= best([Variant(name, value, lr) for name in tricks for value in tricks[name].values], "strengths")
    strengths = {name: first_best(each) for name, each in means.items()}
    strengths[ALL] = strengths["SAM"]
    values = {**strengths, PLAIN: None}
    finals = made([Variant(name, values.get(name), lr) for name in tricks], scale.seeds, "finals")
    return {
        "sweep": [
            {"setting": setting, "trick": name, "val": {str(value): mean for value, mean in each.items()}}
            for name, each in means.items()
        ],
        "rows": figures(setting, {variant.trick: runs for variant, runs in finals.items()}, strengths),
        "runs": [{"job": job, **run} for job, run in done.items()],
    }


def first_best(means: Mapping[float, float]) -> float:
    """The strength that validates best, the first of equals."""
    return max(means, key=lambda strength: means[strength])


def run_of(run: Mapping[str, Any]) -> Run:
    """What is kept of a run: accuracies, the samples that passed, and seconds."""
    if "error" in run:
        raise RuntimeError(run["error"])
    found = run["metrics"]
    return {
        "val": round(found["val_accuracy"], 4),
        "test": round(found["test_accuracy"], 4),
        "forward": int(found["forward"]),
        "backward": int(found["backward"]),
        "seconds": round(run["seconds"], 1),
    }


def result(scale: Scale, runs: Path, processes: int) -> dict[str, Any]:
    """All settings, each in a process."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = [*pool.map(partial(measure, scale=scale, folder=runs), *zip(*SETTINGS, strict=True))]
    parts = {part: [line for each in found for line in each[part]] for part in ("sweep", "rows", "runs")}
    return {
        "benchmark": "quality",
        "machine": machine("lightning-tricks", "scikit-learn", "scikit-image", "timm"),
        "settings": {**scale._asdict(), "noise": NOISE, "tasks": {name: described(name) for name in TASKS}},
        **parts,
        "runs": sorted(parts["runs"], key=lambda run: run["job"]),
    }


def described(name: str) -> dict[str, Any]:
    """The settings of plain training on a task."""
    task = TASKS[name]
    sizes = {part: len(labels) for part, (_, labels) in split(name, "clean labels").items()}
    return {
        "samples": sizes,
        **{field: getattr(task, field) for field in task._fields if field not in task._fields[:2]},
    }


def main() -> None:
    """Run, write; a full run puts its tables into the README, a reduced one prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="two batches and two seeds, into results/scratch")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--output", type=Path, help="another folder for quality.json")
    args = parser.parse_args()
    folder = args.output or (RESULTS / "scratch" if args.reduced else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    runs = (args.output or RESULTS / "scratch") / ("quality, reduced" if args.reduced else "quality")
    made = result(REDUCED if args.reduced else Scale(), runs, args.processes)
    (folder / "quality.json").write_text(written(made))
    shutil.rmtree(runs)
    if folder == RESULTS:
        renew(made)
    else:
        print(tables(made))


if __name__ == "__main__":
    main()
