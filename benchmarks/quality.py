"""Which tricks help and which hurt: three tasks, clean and wrong labels, a stock Trainer, five seeds.

Run ``python benchmarks/quality.py`` (minutes on four cores; ``--reduced`` runs everything in under one). It
writes ``benchmarks/results/quality.json`` after every fit, goes on where it was interrupted on this machine with these
versions, begins anew where it was finished, and renews the tables of
``benchmarks/README.md``. The tasks are those of ``configs/``: digits (a perceptron), textures (a small CNN with
BatchNorm), glosses (a transformer block). With noisy labels the same 40% of the training labels are another class in
every run; validation and test labels are always true. The seed draws the initial weights and the order of the batches.
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
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from functools import cache
from itertools import chain
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
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import lightning_tricks as lt
from lightning_tricks.examples import digits, glosses, textures
from lightning_tricks.examples.tasks import QUIET, Classifier, SharpClassifier, Split, accuracy
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


class Job(NamedTuple):
    """One fit; ``value`` is the trick's strength."""

    task: str
    labels: str
    trick: str
    value: float | None
    lr: float
    seed: int


class Scale(NamedTuple):
    """How much is run."""

    seeds: tuple[int, ...] = SEEDS
    sweep_seeds: tuple[int, ...] = SWEEP_SEEDS
    epochs: int | None = None  # None: the task's
    batches: int | None = None  # of an epoch; None: all


REDUCED = Scale((0, 1), (100,), epochs=1, batches=2)


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


class Passes:
    """Counts the samples that pass through a network, and those that do with gradients."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def __call__(self, network: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self.forward += len(output)
        self.backward += len(output) * output.requires_grad


def fit(job: Job, scale: Scale) -> Run:
    """Validation and test accuracy at the end, seconds, and the samples that passed."""
    task, recipe = TASKS[job.task], TRICKS[job.trick].recipe(job.value)
    data = split(job.task, job.labels)
    train, passes = TensorDataset(*data["train"]), Passes()
    with small_runs():  # of one thread
        pl.seed_everything(job.seed, verbose=False)
        module = classifier(task, recipe, job.lr)
        hook = module.network.register_forward_hook(passes)
        trainer = pl.Trainer(
            max_epochs=max(1, round((scale.epochs or task.epochs) * recipe.epochs)),
            limit_train_batches=scale.batches,
            limit_val_batches=0,
            **QUIET,
            callbacks=[*recipe.callbacks],
        )
        begin = time.perf_counter()
        # a batch is indexed at once, which is quicker than sample by sample
        batches = BatchSampler(RandomSampler(train), task.batch, drop_last=False)
        trainer.fit(module, DataLoader(train, batch_size=None, sampler=batches), DataLoader(train))
        seconds = round(time.perf_counter() - begin, 1)
        hook.remove()
        module.eval()
        val, test = (round(accuracy(module.network, *data[part]).item(), 4) for part in ("val", "test"))
    return {"val": val, "test": test, "forward": passes.forward, "backward": passes.backward, "seconds": seconds}


@cache
def split(task: str, labels: str) -> Split:
    """The data, read once a process."""
    return TASKS[task].load(NOISE[labels])


def classifier(task: Task, recipe: Recipe, lr: float) -> Classifier:
    """The module: without SAM an ordinary one that knows nothing of the tricks."""
    settings: dict[str, Any] = {"optimizer": task.optimizer, "weight_decay": task.weight_decay}
    settings |= {"lr": lr, "label_smoothing": recipe.smoothing}
    if recipe.sam is None:
        return Classifier(task.network(), **settings)
    return SharpClassifier(task.network(), recipe.sam, **settings)


class Runs:
    """The runs of a file, which has those of an interrupted run of the same kind; missing ones are made."""

    def __init__(self, output: Path, scale: Scale, pool: Executor) -> None:
        self.output, self.scale, self.pool = output, scale, pool
        settings = {**scale._asdict(), "noise": NOISE, "tasks": {name: described(name) for name in TASKS}}
        self.result: dict[str, Any] = {
            "benchmark": "quality",
            "machine": machine("lightning-tricks", "scikit-learn", "scikit-image", "timm"),
            "settings": json.loads(json.dumps(settings)),  # as they are read
            "sweep": [],
            "rows": [],
        }
        self.done: dict[str, Run] = {}
        before = json.loads(output.read_text()) if output.exists() else {"rows": []}
        finished = len({row["setting"] for row in before["rows"]}) == len(SETTINGS)
        if not finished and all(before.get(part) == self.result[part] for part in ("machine", "settings")):
            self.done = {run.pop("job"): run for run in before["runs"]}

    def make(self, jobs: Iterable[Job]) -> None:
        """Run what is missing, at the same time."""
        missing = {self.pool.submit(fit, job, self.scale): job for job in jobs if key(job) not in self.done}
        for number, future in enumerate(as_completed(missing), 1):
            self.done[key(missing[future])] = future.result()
            self.write()
            print(f"{number}/{len(missing)}", key(missing[future]), future.result(), flush=True)

    def write(self) -> None:
        """Replace the file by what there is now."""
        new = self.output.with_suffix(".new")
        new.write_text(
            written({**self.result, "runs": [{"job": job, **run} for job, run in sorted(self.done.items())]})
        )
        new.replace(self.output)

    def of(self, jobs: list[Job]) -> list[Run]:
        """Their figures."""
        return [self.done[key(job)] for job in jobs]


def key(job: Job) -> str:
    return f"{job.task}, {job.labels} | {job.trick} | {job.value} | lr {job.lr} | seed {job.seed}"


def described(name: str) -> dict[str, Any]:
    """The settings of plain training on a task."""
    task = TASKS[name]
    sizes = {part: len(labels) for part, (_, labels) in split(name, "clean labels").items()}
    return {
        "samples": sizes,
        **{field: getattr(task, field) for field in task._fields if field not in task._fields[:2]},
    }


def measure(runs: Runs, task: str, labels: str) -> None:
    """The learning rate of plain training, the strengths of the tricks, then the runs that count.

    A job of plain training has its strength in ``lr`` and no ``value``.
    """
    tricks = {name: trick for name, trick in TRICKS.items() if task in trick.tasks}

    def jobs(name: str, value: float | None, lr: float, seeds: tuple[int, ...]) -> list[Job]:
        return [Job(task, labels, name, value, lr, seed) for seed in seeds]

    def best(grid: dict[float, list[Job]]) -> tuple[float, dict[str, float]]:
        """The value that validates best, the first of equals, and the validation accuracy of each."""
        means = {value: round(fmean(run["val"] for run in runs.of(each)), 4) for value, each in grid.items()}
        return max(means, key=lambda value: means[value]), {str(value): mean for value, mean in means.items()}

    again = runs.scale.sweep_seeds
    rates = {lr: jobs(PLAIN, None, lr, again) for lr in TASKS[task].lrs}
    runs.make(chain(*rates.values()))
    lr, means = best(rates)
    grids = {name: {value: jobs(name, value, lr, again) for value in tricks[name].values} for name in tricks}
    runs.make(chain(*(each for grid in grids.values() for each in grid.values())))
    found = {PLAIN: (lr, means), **{name: best(grid) for name, grid in grids.items() if grid}}
    strengths = {name: value for name, (value, _) in found.items()}
    strengths[ALL] = strengths["SAM"]
    finals = {name: jobs(name, strengths.get(name) if name != PLAIN else None, lr, runs.scale.seeds) for name in tricks}
    runs.make(chain(*finals.values()))
    setting = f"{task}, {labels}"
    runs.result["sweep"] += [{"setting": setting, "trick": name, "val": each} for name, (_, each) in found.items()]
    runs.result["rows"] += figures(setting, {name: runs.of(each) for name, each in finals.items()}, strengths)
    runs.write()


def main() -> None:
    """Run, write; a full run puts its tables into the README, a reduced one prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="two batches and two seeds, into results/scratch")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--output", type=Path, help="another folder for quality.json")
    args = parser.parse_args()
    folder = args.output or (RESULTS / "scratch" if args.reduced else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        runs = Runs(folder / "quality.json", REDUCED if args.reduced else Scale(), pool)
        for task, labels in SETTINGS:
            measure(runs, task, labels)
    if folder == RESULTS:
        renew(runs.result)
    else:
        print(tables(runs.result))


if __name__ == "__main__":
    main()
