"""Where each trick helps: wrong labels, few samples, rare classes, shifted test images, and a sequence task.

``nice python benchmarks/regimes.py`` (about 20 minutes of one core; ``--reduced`` runs all for two batches). The
fits are those of ``lightning_tricks.compare``: interrupted, the command goes on where it was. It writes the figures to
``benchmarks/results/regimes.json``, the heat map ``regimes.png`` beside it, and a part of ``benchmarks/README.md``.

The tasks are those of ``quality.py``, and text (``regimes_text.py``), a language model of characters. A regime changes
the training data: labels that are another class, 10% of the samples, or a long tail, in which the last class has a
tenth of its samples and those between decay geometrically. All regimes of a task train on as many samples in total, so
that smaller data have more epochs. Accuracy is the mean of those of the classes (balanced accuracy), and beside it
stands the expected calibration error (15 bins). Shifted test images (noise, blur, rotation) are seen by the models of
the clean regime, without further training.

Tricks have the defaults of their documentation, and where there is none the value in ``TRICKS``. The learning rate of
plain training, a constant one, is chosen of three for each task and regime by validation, with two seeds that are not
used again; tricks keep it. ScheduleFree and Lion have other learning rates, chosen likewise. SAM takes twice the
compute an epoch: it comes with half of the epochs as well.
"""

from __future__ import annotations

import argparse
import gc
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import lightning.pytorch as pl
import regimes_report
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from machine import machine
from quality import TASKS as QUALITY_TASKS
from quality import Task
from regimes_report import LOSS_TASKS, PLAIN, SHIFTS, SWEEP, rows
from regimes_text import CHARACTERS, CharacterTransformer, load_text
from rows import written
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

import lightning_tricks as lt
from lightning_tricks.examples.tasks import QUIET, Classifier, Split, TaskData, mislabel
from lightning_tricks_cli.runs.demo import small_runs

RESULTS = Path(__file__).parent / "results"
SEEDS, SWEEP_SEEDS, MORE_SEEDS = tuple(range(5)), (100, 101), tuple(range(5, 15))
MORE = ("digits", "EMA")  # the task and the trick that get MORE_SEEDS as well

TASKS = {
    **QUALITY_TASKS,
    "digits": QUALITY_TASKS["digits"]._replace(epochs=15),
    "text": Task(lambda _: load_text(), CharacterTransformer, 4, 16, "adamw", 0.01, (0.003, 0.01, 0.03)),
}
CLASSES = {"digits": 10, "textures": 3, "glosses": 5, "text": len(CHARACTERS)}
PICTURES = ("digits", "textures")


class Regime(NamedTuple):
    """What is wrong with the training data."""

    noise: float = 0.0  # share of wrong labels
    share: float = 1.0  # of the samples of each class
    rarest: float = 1.0  # further share of the last class; those between decay geometrically


REGIMES = {
    "clean": Regime(),
    "20% wrong labels": Regime(noise=0.2),
    "40% wrong labels": Regime(noise=0.4),
    "10% of the samples": Regime(share=0.1),
    "long tail": Regime(rarest=0.1),
}
CELLS = [
    *(("digits", regime) for regime in REGIMES),
    *(("textures", "clean"), ("textures", "40% wrong labels")),
    *(("glosses", regime) for regime in REGIMES if regime != "20% wrong labels"),
    ("text", "clean"),
]


class Recipe(NamedTuple):
    """What a trick changes in plain training."""

    callbacks: tuple[Callback, ...] = ()
    sam: lt.SAM | None = None
    smoothing: float = 0.0
    epochs: float = 1.0  # times the task's
    optimizer: str | None = None  # a name of ``lt.optimizers()`` in place of the task's
    change: Callable[[nn.Module], object] | None = None  # of the network


class Trick(NamedTuple):
    """A row of the heat map."""

    recipe: Callable[[], Recipe]
    tasks: tuple[str, ...] = tuple(TASKS)
    regimes: tuple[str, ...] = tuple(REGIMES)
    lrs: tuple[float, ...] = ()  # to choose from; without them that of plain training


CLEAN = ("clean",)  # regimes of what makes training cheaper or is an optimizer
BRANCHES = r"block(s\.\d)?\.dropout[12]$"
TRICKS = {
    PLAIN: Trick(Recipe),
    "EMA": Trick(lambda: Recipe((lt.EMA(),))),
    "SWA": Trick(lambda: Recipe((lt.SWA(),))),
    "SAM": Trick(lambda: Recipe(sam=lt.SAM())),
    "SAM, half the epochs": Trick(lambda: Recipe(sam=lt.SAM(), epochs=0.5)),
    "flat_cos": Trick(lambda: Recipe((lt.LRSchedule("flat_cos"),))),
    "one_cycle": Trick(lambda: Recipe((lt.LRSchedule("one_cycle"),))),
    "Mixup": Trick(lambda: Recipe((lt.Mixup(),)), PICTURES),
    "CutMix": Trick(lambda: Recipe((lt.CutMix(),)), PICTURES),
    "HiddenMixup": Trick(lambda: Recipe((lt.HiddenMixup("network.head"),)), ("glosses",)),
    "label smoothing 0.1": Trick(lambda: Recipe(smoothing=0.1)),
    "ScheduleFree": Trick(
        lambda: Recipe((lt.ScheduleFree(),), optimizer="schedulefree_adamw"), regimes=CLEAN, lrs=(0.003, 0.01, 0.03)
    ),
    "Lion": Trick(lambda: Recipe(optimizer="lion"), regimes=CLEAN, lrs=(0.0003, 0.001, 0.003)),
    "AdaptiveClip": Trick(lambda: Recipe((lt.AdaptiveClip(),)), regimes=CLEAN),
    "LayerFreezing": Trick(lambda: Recipe((lt.LayerFreezing(parameters=r"network\.(\d+)"),)), PICTURES, CLEAN),
    "QAT int8": Trick(lambda: Recipe((lt.QAT(),)), ("digits", "glosses", "text"), CLEAN),
    "stochastic depth 0.2": Trick(
        lambda: Recipe(change=partial(lt.add_stochastic_depth, rate=0.2, modules=BRANCHES)), ("glosses", "text")
    ),
    "BlurPool": Trick(lambda: Recipe(change=lt.add_blur_pool), ("textures",), CLEAN),
    "ProgressiveResizing": Trick(lambda: Recipe((lt.ProgressiveResizing(multiple_of=8),)), ("textures",), CLEAN),
    "SequenceLengthWarmup": Trick(lambda: Recipe((lt.SequenceLengthWarmup(),)), ("text",), CLEAN),
}


class Scale(NamedTuple):
    """How much is run."""

    seeds: tuple[int, ...] = SEEDS
    sweep_seeds: tuple[int, ...] = SWEEP_SEEDS
    more_seeds: tuple[int, ...] = MORE_SEEDS
    epochs: int | None = None  # None: the task's
    batches: int | None = None  # of an epoch; None: all


REDUCED = Scale((0, 1), (100, 101), (2, 3), epochs=1, batches=2)


class Measured(Classifier):
    """A classifier that measures accuracy, calibration error and loss; of sequences, in all their places."""

    def __init__(self, network: nn.Module, classes: int, name: str | None = None, **settings: Any) -> None:
        super().__init__(network, **settings)
        self.classes, self.name = classes, name

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        inputs, labels = batch
        logits = self.network(inputs)
        if logits.ndim == 3:
            logits, labels = logits.flatten(0, 1), labels.flatten()
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """All metrics of the validation samples, which are one batch."""
        self._log("val", *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Those of the test samples, and of the shifted ones."""
        self._log(("test", *SHIFTS)[dataloader_idx], *batch)

    def _log(self, part: str, inputs: Tensor, labels: Tensor) -> None:
        logits, labels = self.network(inputs).flatten(0, -2), labels.flatten()
        found = {
            "accuracy": multiclass_accuracy(logits, labels, self.classes, average="macro"),
            "ece": multiclass_calibration_error(logits, labels, self.classes, n_bins=15),
            "loss": F.cross_entropy(logits, labels),
        }
        self.log_dict({f"{part}_{name}": value for name, value in found.items()}, add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        """That of the task, or of the trick."""
        if self.name is None:
            return super().configure_optimizers()
        return lt.optimizer(self.name, self, lr=self.lr, weight_decay=self.weight_decay)


class SharpMeasured(lt.SAMMixin, Measured):
    """The same with sharpness-aware minimization."""

    def __init__(self, *args: Any, sam: lt.SAM, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sam = sam


class Data(TaskData):
    """A task's data in a regime; a batch is indexed at once, which is quicker than sample by sample."""

    def __init__(self, task: str, regime: str) -> None:
        super().__init__(REGIMES[regime].noise, TASKS[task].batch)
        self.task, self.regime = task, regime

    def load(self) -> Split:
        """The data, read once."""
        return split(self.task, self.regime)

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches in a new order every epoch."""
        batches = BatchSampler(RandomSampler(self.data["train"]), self.batch_size, drop_last=False)
        return DataLoader(self.data["train"], batch_size=None, sampler=batches)

    def val_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return at_once(self.data["val"])

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """One batch of the test images, and one of each shift where the training data are clean."""
        parts = [self.data["test"]]
        if self.regime == "clean" and self.task in PICTURES:
            images, labels = parts[0].tensors
            parts += [TensorDataset(shifted(images, shift), labels) for shift in SHIFTS]
        return [at_once(part) for part in parts]


def at_once(data: TensorDataset) -> DataLoader[Any]:
    """All samples as one batch."""
    return DataLoader(data, batch_size=None, sampler=[slice(None)])


@cache
def split(task: str, regime: str) -> Split:
    """The data with what the regime leaves of the training samples; validation and test stay as they are."""
    noise, share, rarest = REGIMES[regime]
    data = TASKS[task].load(0.0)
    if task in LOSS_TASKS:
        return data
    inputs, labels = data["train"]
    generator, classes = torch.Generator().manual_seed(0), CLASSES[task]
    order = torch.randperm(len(labels), generator=generator)
    left = []
    for number in range(classes):
        mine = order[labels[order] == number]
        left.append(mine[: max(1, round(len(mine) * share * rarest ** (number / (classes - 1))))])
    kept = torch.cat(left).sort().values
    wrong = mislabel(labels[kept], noise, classes=classes, generator=generator)
    return {**data, "train": (inputs[kept], wrong)}


def shifted(images: Tensor, shift: str) -> Tensor:
    """Images with noise of half their standard deviation, a mean over 3 x 3 pixels, or rotated by 20 degrees."""
    if shift == "noise":
        return images + images.std() / 2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    if shift == "blur":
        return F.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
    angle = torch.tensor(torch.pi / 9)
    turn = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0]).reshape(1, 2, 3)
    places = F.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, places, padding_mode="border", align_corners=False)


def fit(task: str, regime: str, trick: str, lr: float, scale: Scale, folder: Path) -> tuple[Any, ...]:
    """An arm: Trainer, module and data."""
    recipe, settings = TRICKS[trick].recipe(), TASKS[task]
    smaller = len(split(task, "clean")["train"][1]) / len(split(task, regime)["train"][1])
    epochs = max(1, round((scale.epochs or settings.epochs * smaller) * recipe.epochs))
    network = settings.network()
    if recipe.change is not None:
        recipe.change(network)
    arguments: dict[str, Any] = {"optimizer": settings.optimizer, "weight_decay": settings.weight_decay, "lr": lr}
    arguments |= {"classes": CLASSES[task], "name": recipe.optimizer, "label_smoothing": recipe.smoothing}
    trainer = pl.Trainer(
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        limit_train_batches=scale.batches,
        **QUIET,
        callbacks=[*recipe.callbacks],
    )
    kind = Measured if recipe.sam is None else partial(SharpMeasured, sam=recipe.sam)
    return trainer, kind(network, **arguments), Data(task, regime)


def measure(task: str, regime: str, scale: Scale, folder: Path) -> dict[str, list[Any]]:
    """The learning rates, then the runs that count."""
    metric, better = ("val_loss", min) if task in LOSS_TASKS else ("val_accuracy", max)
    tricks = {name: trick for name, trick in TRICKS.items() if task in trick.tasks and regime in trick.regimes}
    lrs = {PLAIN: TASKS[task].lrs, **{name: trick.lrs for name, trick in tricks.items() if trick.lrs}}
    done: list[dict[str, Any]] = []

    def made(variants: Sequence[tuple[str, float]], seeds: Sequence[int], part: str) -> dict[tuple[str, float], Any]:
        arms = {f"{name}, lr {lr:g}": partial(fit, task, regime, name, lr, scale) for name, lr in variants}
        mode: Any = "min" if better is min else "max"
        runs = lt.compare(arms, metric=metric, mode=mode, seeds=seeds, folder=folder / f"{task}, {regime}" / part).runs
        found = {variant: [run_of(run) for run in runs[arm]] for variant, arm in zip(variants, arms, strict=True)}
        for (name, lr), each in found.items():
            what = {"task": task, "regime": regime, "part": part, "trick": name, "lr": lr}
            done.extend({**what, "seed": seed, **run} for seed, run in zip(seeds, each, strict=True))
        return found

    with small_runs():  # of one thread
        tried = made([(name, lr) for name in lrs for lr in lrs[name]], scale.sweep_seeds, SWEEP)
        means = {
            name: {lr: round(fmean(run[metric] for run in tried[name, lr]), 4) for lr in lrs[name]} for name in lrs
        }
        chosen = {name: better(tried_lrs, key=tried_lrs.__getitem__) for name, tried_lrs in means.items()}
        made([(name, chosen.get(name, chosen[PLAIN])) for name in tricks], scale.seeds, "finals")
        if task == MORE[0] and MORE[1] in tricks:
            made([(name, chosen[PLAIN]) for name in (PLAIN, MORE[1])], scale.more_seeds, "more seeds")
    what = {"task": task, "regime": regime}
    sweep = [
        {**what, "trick": name, "lr": chosen[name], metric: {str(lr): mean for lr, mean in means[name].items()}}
        for name in lrs
    ]
    return {"sweep": sweep, "runs": done}


def run_of(run: Mapping[str, Any]) -> dict[str, float]:
    """The metrics and the seconds of a run that did not fail."""
    if "error" in run:
        raise RuntimeError(run["error"])
    return {**{name: round(value, 4) for name, value in run["metrics"].items()}, "seconds": round(run["seconds"], 1)}


def result(found: Sequence[dict[str, list[Any]]], scale: Scale) -> dict[str, Any]:
    """The figures of the cells that were measured."""
    sweep, runs = ([line for cell in found for line in cell[part]] for part in ("sweep", "runs"))
    settings = {"regimes": {name: regime._asdict() for name, regime in REGIMES.items()}, **scale._asdict()}
    settings |= {"shifts": SHIFTS, "tricks": [*TRICKS]}
    return {
        "benchmark": "regimes",
        "machine": machine("lightning-tricks", "scikit-learn", "scikit-image", "timm", "schedulefree", "torchao"),
        "settings": {**settings, "tasks": {name: described(name) for name in TASKS}},
        "sweep": sweep,
        "rows": rows(runs),
        "runs": runs,
    }


def described(name: str) -> dict[str, Any]:
    """The settings of plain training on a task, and the samples of each regime."""
    regimes = [regime for task, regime in CELLS if task == name]
    task = TASKS[name]._asdict()
    return {
        "samples": {regime: len(split(name, regime)["train"][1]) for regime in regimes},
        **{field: value for field, value in task.items() if field not in ("load", "network")},
    }


def main() -> None:
    """Run, write after every cell; a full run renews its part of the README, a reduced one prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="two batches and two seeds, into results/scratch")
    parser.add_argument("--output", type=Path, help="another folder for regimes.json and regimes.png")
    args = parser.parse_args()
    folder = args.output or (RESULTS / "scratch" if args.reduced else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    runs = (args.output or RESULTS / "scratch") / ("regimes, reduced" if args.reduced else "regimes")
    scale, found = REDUCED if args.reduced else Scale(), []
    gc.freeze()  # what is imported: ``compare`` collects garbage before every run
    for task, regime in CELLS:
        found.append(measure(task, regime, scale, runs))
        (folder / "regimes.json").write_text(written(made := result(found, scale)))
    regimes_report.draw(made, folder / "regimes.png")
    if folder == RESULTS:
        regimes_report.renew(made)
    else:
        print(regimes_report.section(made))
    shutil.rmtree(runs)


if __name__ == "__main__":
    main()
