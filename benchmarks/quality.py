"""Where each trick helps: wrong labels, few samples, rare classes, shifted test data, on four tasks.

``nice python benchmarks/quality.py`` (about three hours of one core; ``--reduced`` runs all for two batches, and
``--only EMA`` measures the named tricks anew, beside plain training, and leaves all others as they are). The fits are
those of ``lightning_tricks.compare``: interrupted, the command goes on where it was. It writes the figures to
``benchmarks/results/quality.json``, the heat map ``quality.svg`` beside it, and a part of ``benchmarks/README.md``.

Three tasks are those of ``configs/``: digits (images, a perceptron), textures (images, a small CNN with BatchNorm) and
glosses (definitions, a transformer block); text (``quality_text.py``) is a language model of characters. A regime
changes the training data: labels (of text: the characters to predict) that are another class, 10% of the samples, or a
long tail, in which the last class has a tenth of its samples and those between decay geometrically. All regimes of a
task train on as many samples in total, so that smaller data have more epochs. Accuracy is the mean of those of the
classes (balanced accuracy), and beside it stands the expected calibration error (15 bins). Shifted test data (noise;
of images blur and rotation, too) are seen by the models of the clean regime, without further training.

Tricks have the starting values that their cards give, or those in ``TRICKS``. The learning rate of
plain training, a constant one, is tuned for each task and regime by validation, with two seeds that are not used again:
from the one in ``TASKS`` up and down a ladder of factors of about three, until neither neighbour of the best is better.
Tricks keep it, ``HardExampleFilter`` half of it. Other optimizers have other learning rates, tuned likewise. "Muon" has
one, as they have. "Muon, both rates", on glosses, has a second one for the weights that AdamW trains, embeddings among
them; tuning begins with all pairs of five rates, which takes six times the runs. Since such a rate may gain with any
optimizer, "AdamW, both rates" has the same two, for the same weights.

Equal compute: SAM takes twice the compute of an epoch, so it comes with half of the epochs as well, and plain training
with twice the epochs; ProgressiveResizing takes two thirds of the pixels, and comes with 1.5 times the epochs as well.
Plain training with half of the epochs shows what stopping early does.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import quality_report
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from machine import machine
from quality_report import LOSS_TASKS, PLAIN, SHIFTS, SWEEP, rows
from quality_text import CHARACTERS, CharacterTransformer, load_text
from rows import shortened, written
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset, WeightedRandomSampler
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

import lightning_tricks as lt
from lightning_tricks.examples import digits, glosses, textures
from lightning_tricks.examples.tasks import QUIET, Classifier, Split, TaskData, mislabel
from lightning_tricks_cli.runs.demo import small_runs

RESULTS = Path(__file__).parent / "results"
SWEEP_SEEDS = (100, 101)  # the learning rate is chosen with these alone


class Task(NamedTuple):
    """Data, network, and how plain training goes."""

    load: Callable[[float], Split]
    network: Callable[[], nn.Module]
    epochs: int
    batch: int
    optimizer: str
    weight_decay: float
    lr: float  # where tuning begins
    seeds: int = 5


def digit_pictures(noise: float) -> Split:
    """The digits as pictures, which CutMix needs."""
    return {part: (images.reshape(-1, 1, 8, 8), labels) for part, (images, labels) in digits.load_digits(noise).items()}


TASKS = {
    "digits": Task(
        digit_pictures,
        lambda: nn.Sequential(nn.Flatten(), digits.network()),
        epochs=15,
        batch=64,
        optimizer="sgd",
        weight_decay=5e-4,
        lr=0.1,
        seeds=15,
    ),
    "textures": Task(
        textures.load_textures,
        textures.network,
        epochs=20,
        batch=32,
        optimizer="sgd",
        weight_decay=5e-4,
        lr=0.03,
    ),
    "glosses": Task(
        glosses.load_glosses,
        glosses.GlossTransformer,
        epochs=5,
        batch=64,
        optimizer="adamw",
        weight_decay=0.01,
        lr=0.01,
    ),
    "text": Task(
        lambda _: load_text(),
        CharacterTransformer,
        epochs=4,
        batch=16,
        optimizer="adamw",
        weight_decay=0.01,
        lr=0.01,
    ),
}
Rate = float | tuple[float, float]  # of the optimizer; the second one is ``adamw_lr``
LADDER = [float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 3)]  # of learning rates
DIVERGED = {"loss": 99.0, "accuracy": 0.0, "ece": 1.0}  # what counts where a metric is not finite
CLASSES = {"digits": 10, "textures": 3, "glosses": 5, "text": len(CHARACTERS)}
PICTURES, LABELLED, LINEAR = ("digits", "textures"), ("digits", "textures", "glosses"), ("digits", "glosses", "text")
NOISE = {"digits": 0.5, "textures": 0.15}  # in the test images, in standard deviations of theirs
REPLACED = 0.2  # share of the words or characters that other ones replace in noisy test data


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
CELLS = [(task, regime) for task in TASKS for regime in REGIMES if (task, regime) != ("text", "long tail")]


class Recipe(NamedTuple):
    """What a trick changes in plain training."""

    callbacks: tuple[Callback, ...] = ()
    sam: lt.SAM | None = None
    smoothing: float = 0.0
    weighted: bool = False  # whether the loss of a sample is divided by the frequency of its class
    balanced: bool = False  # whether samples are drawn with that as their weight
    epochs: float = 1.0  # times the task's
    optimizer: str | None = None  # a name of ``lt.optimizers()`` in place of the task's
    weight_decay: float | None = None  # None: the task's
    settings: Mapping[str, Any] = MappingProxyType({})  # further ones of that optimizer
    change: Callable[[nn.Module], object] | None = None  # of the network


class Trick(NamedTuple):
    """A row of the heat map."""

    recipe: Callable[[], Recipe]
    tasks: tuple[str, ...] = tuple(TASKS)
    lr: Rate | None = None  # where tuning of its own begins; None: that of plain training
    factor: float = 1.0  # by which that is multiplied


class Rounded(Callback):
    """Rounds the trained weights to 4 bits."""

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Test what an export has."""
        lt.quantize(pl_module, "int4")


BRANCHES = r"block(s\.\d)?\.dropout[12]$"
HEADS = r"network\.(head|1\.4|13)\."  # of texts, digits and textures
LAYERS = r"network\.(?:1\.)?(\d+)"  # of digits and textures
TRICKS = {
    PLAIN: Trick(Recipe),
    "plain, half the epochs": Trick(lambda: Recipe(epochs=0.5)),
    "plain, twice the epochs": Trick(lambda: Recipe(epochs=2.0)),
    "EMA": Trick(lambda: Recipe((lt.EMA(),))),
    "SWA": Trick(lambda: Recipe((lt.SWA(),))),
    "SAM": Trick(lambda: Recipe(sam=lt.SAM())),
    "SAM, rho 0.3": Trick(lambda: Recipe(sam=lt.SAM(0.3))),
    "SAM, half the epochs": Trick(lambda: Recipe(sam=lt.SAM(), epochs=0.5)),
    "flat_cos": Trick(lambda: Recipe((lt.LRSchedule("flat_cos"),))),
    "one_cycle": Trick(lambda: Recipe((lt.LRSchedule("one_cycle"),))),
    "EMA + flat_cos": Trick(lambda: Recipe((lt.EMA(), lt.LRSchedule("flat_cos")))),
    "SAM + EMA + flat_cos": Trick(lambda: Recipe((lt.EMA(), lt.LRSchedule("flat_cos")), lt.SAM())),
    "Mixup": Trick(lambda: Recipe((lt.Mixup(),)), PICTURES),
    "CutMix": Trick(lambda: Recipe((lt.CutMix(),)), PICTURES),
    "HiddenMixup": Trick(lambda: Recipe((lt.HiddenMixup("network.head"),)), ("glosses",)),
    "label smoothing 0.1": Trick(lambda: Recipe(smoothing=0.1)),
    "LogitAdjustment": Trick(lambda: Recipe((lt.LogitAdjustment(),)), LABELLED),
    "class weights": Trick(lambda: Recipe(weighted=True), LABELLED),
    "balanced sampling": Trick(lambda: Recipe(balanced=True), LABELLED),
    "AutoClip": Trick(lambda: Recipe((lt.AutoClip(),))),
    "AdaptiveClip": Trick(lambda: Recipe((lt.AdaptiveClip(0.1, exclude=HEADS),))),
    "HardExampleFilter": Trick(lambda: Recipe((lt.HardExampleFilter(),)), LABELLED, factor=0.5),
    'HardExampleFilter, mode="loss"': Trick(lambda: Recipe((lt.HardExampleFilter(mode="loss"),)), LABELLED, factor=0.5),
    "ScheduleFree": Trick(lambda: Recipe((lt.ScheduleFree(),), optimizer="schedulefree_adamw"), lr=0.01),
    "Lion": Trick(lambda: Recipe(optimizer="lion"), lr=0.001),
    "Muon": Trick(lambda: Recipe(optimizer="muon"), lr=0.01),
    "Muon, both rates": Trick(lambda: Recipe(optimizer="muon"), ("glosses",), lr=(0.01, 0.01)),
    "AdamW, both rates": Trick(lambda: Recipe(optimizer="adamw"), ("glosses",), lr=(0.01, 0.01)),
    "LayerFreezing": Trick(lambda: Recipe((lt.LayerFreezing(parameters=LAYERS),)), PICTURES),
    "rounded to int4": Trick(lambda: Recipe((Rounded(),)), LINEAR),
    "QAT int4": Trick(lambda: Recipe((lt.QAT("int4", start=0.5),)), LINEAR),
    "stochastic depth 0.2": Trick(
        lambda: Recipe(change=partial(lt.add_stochastic_depth, rate=0.2, modules=BRANCHES)), ("glosses", "text")
    ),
    "BlurPool": Trick(lambda: Recipe(change=lt.add_blur_pool), ("textures",)),
    "ProgressiveResizing": Trick(lambda: resized(1.0), ("textures",)),
    "ProgressiveResizing, 1.5 times the epochs": Trick(lambda: resized(1.5), ("textures",)),
    "SequenceLengthWarmup": Trick(lambda: Recipe((lt.SequenceLengthWarmup(),)), ("text",)),
}


def resized(epochs: float) -> Recipe:
    """Images that grow from 16 to 32 pixels."""
    return Recipe((lt.ProgressiveResizing(multiple_of=8),), epochs=epochs)


class Scale(NamedTuple):
    """How much is run."""

    seeds: int | None = None  # None: the task's
    epochs: int | None = None  # None: the task's
    batches: int | None = None  # of an epoch; None: all
    tunes: bool = True  # False: the learning rates are those where tuning begins


REDUCED = Scale(2, epochs=1, batches=2, tunes=False)


class Measured(Classifier):
    """A classifier that measures accuracy, calibration error and loss; of sequences, in all their places."""

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        name: str | None = None,
        further: Mapping[str, Any] | None = None,
        weight: Tensor | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(network, **settings)
        self.classes, self.name, self.further, self.weight = classes, name, further or {}, weight

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        inputs, labels = batch
        logits = self.network(inputs)
        if logits.ndim == 3:
            logits, labels = logits.flatten(0, 1), labels.flatten()
        return F.cross_entropy(logits, labels, self.weight, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """All metrics of the validation samples, which are one batch."""
        self._log("val", *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Those of the test data, and of the shifted ones."""
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
        settings = {"lr": self.lr, "weight_decay": self.weight_decay, **self.further}
        if self.name == "adamw" and "adamw_lr" in settings:
            groups = lt.optimizer("muon", self, **settings).param_groups
            return torch.optim.AdamW([{key: each[key] for key in ("params", "lr", "weight_decay")} for each in groups])
        return lt.optimizer(self.name, self, **settings)


class SharpMeasured(lt.SAMMixin, Measured):
    """The same with sharpness-aware minimization."""

    def __init__(self, *args: Any, sam: lt.SAM, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sam = sam


class Data(TaskData):
    """A task's data in a regime; a batch is indexed at once, which is quicker than sample by sample."""

    def __init__(self, task: str, regime: str, balanced: bool = False) -> None:
        super().__init__(REGIMES[regime].noise, TASKS[task].batch)
        self.task, self.regime, self.balanced = task, regime, balanced

    def load(self) -> Split:
        """The data, read once."""
        return split(self.task, self.regime)

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches in a new order every epoch, or drawn with replacement, classes equally often."""
        labels = self.data["train"].tensors[1]
        sampler: Sampler[int] = RandomSampler(labels)
        if self.balanced:
            sampler = WeightedRandomSampler(class_weights(self.task, self.regime)[labels].tolist(), len(labels))
        batches = BatchSampler(sampler, self.batch_size, drop_last=False)
        return DataLoader(self.data["train"], batch_size=None, sampler=batches)

    def val_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return at_once(self.data["val"])

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """One batch of the test data, and one of each shift where the training data are clean."""
        inputs, labels = self.data["test"].tensors
        parts = [self.data["test"]]
        if self.regime == "clean":
            parts += [TensorDataset(shifted(self.task, inputs, shift), labels) for shift in shifts(self.task)]
        return [at_once(part) for part in parts]


def at_once(data: TensorDataset) -> DataLoader[Any]:
    """All samples as one batch."""
    return DataLoader(data, batch_size=None, sampler=[slice(None)])


@cache
def split(task: str, regime: str) -> Split:
    """The data with what the regime leaves of the training samples; validation and test stay as they are."""
    noise, share, rarest = REGIMES[regime]
    data = TASKS[task].load(0.0)
    inputs, labels = data["train"]
    generator, classes = torch.Generator().manual_seed(0), CLASSES[task]
    order = torch.randperm(len(labels), generator=generator)
    if task in LOSS_TASKS:
        left = [order[: round(len(order) * share)]]
    else:
        kinds = [order[labels[order] == number] for number in range(classes)]
        shares = [share * rarest ** (number / (classes - 1)) for number in range(classes)]
        left = [mine[: max(1, round(len(mine) * kept))] for mine, kept in zip(kinds, shares, strict=True)]
    kept = torch.cat(left).sort().values
    wrong = mislabel(labels[kept].flatten(), noise, classes=classes, generator=generator)
    return {**data, "train": (inputs[kept], wrong.reshape(labels[kept].shape))}


def class_weights(task: str, regime: str) -> Tensor:
    """The mean number of training labels of a class over that of each one (C,)."""
    counts = split(task, regime)["train"][1].bincount(minlength=CLASSES[task])
    return counts.sum() / (len(counts) * counts)


def shifts(task: str) -> tuple[str, ...]:
    """The shifts of the test data."""
    return SHIFTS if task in PICTURES else SHIFTS[:1]


def shifted(task: str, inputs: Tensor, shift: str) -> Tensor:
    """Images with noise, a mean over 3 x 3 pixels, or rotated by 20 degrees; tokens of which some are other ones."""
    generator = torch.Generator().manual_seed(0)
    if task not in PICTURES:
        others = inputs.flatten()[torch.randperm(inputs.numel(), generator=generator)].reshape(inputs.shape)
        replaced = torch.rand(inputs.shape, generator=generator) < REPLACED
        return torch.where(
            replaced & (inputs > 0) & (others > 0), others, inputs
        )  # 0: padding of glosses, end of a line
    if shift == "noise":
        return inputs + NOISE[task] * inputs.std() * torch.randn(inputs.shape, generator=generator)
    if shift == "blur":
        return F.avg_pool2d(inputs, 3, 1, 1, count_include_pad=False)
    angle = torch.tensor(torch.pi / 9)
    turn = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0]).reshape(1, 2, 3)
    places = F.affine_grid(turn.expand(len(inputs), 2, 3), list(inputs.shape), align_corners=False)
    return F.grid_sample(inputs, places, padding_mode="border", align_corners=False)


def fit(task: str, regime: str, trick: Trick, rate: Rate, scale: Scale, folder: Path) -> tuple[Any, ...]:
    """An arm: Trainer, module and data."""
    recipe, settings = trick.recipe(), TASKS[task]
    smaller = len(split(task, "clean")["train"][1]) / len(split(task, regime)["train"][1])
    epochs = max(1, round((scale.epochs or settings.epochs * smaller) * recipe.epochs))
    network = settings.network()
    if recipe.change is not None:
        recipe.change(network)
    rates = named(rate)
    weight_decay = settings.weight_decay if recipe.weight_decay is None else recipe.weight_decay
    arguments: dict[str, Any] = {"optimizer": settings.optimizer, "weight_decay": weight_decay, "lr": rates.pop("lr")}
    arguments |= {"classes": CLASSES[task], "name": recipe.optimizer, "label_smoothing": recipe.smoothing}
    arguments["weight"] = class_weights(task, regime) if recipe.weighted else None
    trainer = L.Trainer(
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        limit_train_batches=scale.batches,
        **QUIET,
        callbacks=[*recipe.callbacks],
    )
    kind = Measured if recipe.sam is None else partial(SharpMeasured, sam=recipe.sam)
    return (
        trainer,
        kind(network, further={**recipe.settings, **rates}, **arguments),
        Data(task, regime, recipe.balanced),
    )


def measure(
    task: str,
    regime: str,
    scale: Scale,
    folder: Path,
    tricks: Mapping[str, Trick] | None = None,
    plain_lr: float | None = None,
) -> dict[str, list[Any]]:
    """The learning rates, then the runs that count.

    Args:
        task: A name of ``TASKS``.
        regime: A name of ``REGIMES``.
        scale: How much is run.
        folder: Where runs are kept, so that an interrupted benchmark goes on.
        tricks: Those to measure, ``TRICKS`` by default.
        plain_lr: The learning rate of plain training where that is known.
    """
    score, better = ("loss", min) if task in LOSS_TASKS else ("accuracy", max)
    metric, parts = f"val_{score}", ("test", *(shifts(task) if regime == "clean" else ()))
    tested = [f"{part}_{what}" for part in parts for what in (score, "ece")]
    tricks = {name: trick for name, trick in (tricks or TRICKS).items() if task in trick.tasks}
    chosen: dict[str, Rate] = {PLAIN: plain_lr or TASKS[task].lr}
    chosen |= {name: trick.lr for name, trick in tricks.items() if trick.lr is not None}
    tuned = [name for name in chosen if name in tricks and (name != PLAIN or plain_lr is None)]
    means: dict[str, dict[Rate, float]] = {name: {} for name in tuned}
    done: dict[str, list[dict[str, Any]]] = {}

    def made(variants: Sequence[tuple[str, Rate]], seeds: Sequence[int], part: str) -> dict[tuple[str, Rate], Any]:
        arms = {label(name, rate): partial(fit, task, regime, tricks[name], rate, scale) for name, rate in variants}
        mode: Any = "min" if better is min else "max"
        runs = lt.compare(arms, metric=metric, mode=mode, seeds=seeds, folder=folder / f"{task}, {regime}" / part).runs
        kept = (metric,) if part == SWEEP else tested
        found = {variant: [run_of(run, kept) for run in runs[arm]] for variant, arm in zip(variants, arms, strict=True)}
        done[part] = []
        for (name, rate), each in found.items():
            what = {"task": task, "regime": regime, "part": part, "trick": name, **named(rate)}
            done[part] += [{**what, "seed": seed, **run} for seed, run in zip(seeds, each, strict=True)]
        return found

    with small_runs():  # of one thread
        wanted = [(name, rate) for name in tuned for rate in first(chosen[name])]
        while wanted and scale.tunes:
            tried = [(name, rate) for name, of_name in means.items() for rate in of_name]
            for (name, rate), runs in made([*tried, *wanted], SWEEP_SEEDS, SWEEP).items():
                means[name][rate] = round(fmean(run[metric] for run in runs), 4)
            chosen |= {name: better(of_name, key=of_name.__getitem__) for name, of_name in means.items()}
            near = [(name, each) for name in tuned for each in neighbours(chosen[name])]
            wanted = [(name, rate) for name, rate in near if rate not in means[name]]
        seeds = range(scale.seeds or TASKS[task].seeds)
        finals = [(name, chosen.get(name, trick.factor * chosen[PLAIN])) for name, trick in tricks.items()]
        made(finals, seeds, "finals")
    what = {"task": task, "regime": regime}
    sweep = [
        {**what, "trick": name, **named(chosen[name]), metric: {str(rate): tried[rate] for rate in sorted(tried)}}
        for name, tried in means.items()
    ]
    return {"sweep": sweep, "runs": [run for runs in done.values() for run in runs]}


def named(rate: Rate) -> dict[str, float]:
    """The settings of the optimizer that a rate stands for."""
    return {"lr": rate[0], "adamw_lr": rate[1]} if isinstance(rate, tuple) else {"lr": rate}


def label(name: str, rate: Rate) -> str:
    """The name of an arm."""
    return ", ".join([name, *(f"{setting} {value:g}" for setting, value in named(rate).items())])


def first(rate: Rate) -> list[Rate]:
    """Where tuning begins: with a rate and its neighbours, or with all pairs of rates up to two steps from two."""
    if isinstance(rate, tuple):
        near = [LADDER[place - 2 : place + 3] for place in map(LADDER.index, rate)]
        return [*product(*near)]
    return [rate, *neighbours(rate)]


def neighbours(rate: Rate) -> list[Rate]:
    """The next smaller and the next larger learning rate; of two rates, either one's beside the other as it is."""
    if isinstance(rate, tuple):
        one, other = rate
        return [(each, other) for each in neighbours(one)] + [(one, each) for each in neighbours(other)]
    place = LADDER.index(rate)
    return LADDER[max(place - 1, 0) : place] + LADDER[place + 1 : place + 2]


def run_of(run: Mapping[str, Any], kept: Sequence[str]) -> dict[str, float]:
    """The kept metrics and the seconds of a run that did not fail."""
    if "error" in run:
        raise RuntimeError(run["error"])
    metrics = {name: run["metrics"][name] for name in kept}
    found = {
        name: round(value, 4) if isfinite(value) else DIVERGED[name.split("_")[1]] for name, value in metrics.items()
    }
    return {**found, "seconds": shortened(run["seconds"])}


def result(
    found: Sequence[dict[str, list[Any]]],
    scale: Scale,
    kept: Mapping[str, Any] | None = None,
    names: Collection[str] = (),
) -> dict[str, Any]:
    """The figures of the cells that were measured; with kept ones, in those, for the named tricks alone.

    These are compared with their controls, the plain runs that were made beside them: another machine rounds otherwise.
    """
    sweep, runs = ([line for cell in found for line in cell[part]] for part in ("sweep", "runs"))
    settings = {"regimes": {name: regime._asdict() for name, regime in REGIMES.items()}, **scale._asdict()}
    settings |= {"sweep_seeds": SWEEP_SEEDS, "shifts": SHIFTS, "tricks": [*TRICKS]}
    here = machine("lightning-tricks", "scikit-learn", "scikit-image", "timm", "schedulefree", "torchao")
    machines, controls = {"machine": here}, []
    if kept:
        beside = [run for run in runs if run["trick"] == PLAIN and run["part"] != SWEEP]
        others = [{**each, "tricks": [*{*each["tricks"]} - {*names}]} for each in kept.get("controls", [])]
        controls = [each for each in others if each["tricks"]] + [{"tricks": [*names], **run} for run in beside]
        sweep, runs = ([line for line in mine if line["trick"] in names] for mine in (sweep, runs))
        machines = {"machine": kept["machine"], "renewed": {**kept.get("renewed", {}), **dict.fromkeys(names, here)}}
        sweep, runs = (
            sorted([line for line in kept[part] if line["trick"] not in names] + mine, key=_place)
            for part, mine in (("sweep", sweep), ("runs", runs))
        )
    return {
        "benchmark": "quality",
        **machines,
        "settings": {**settings, "tasks": {name: described(name) for name in TASKS}},
        "sweep": sweep,
        "rows": rows(runs, controls),
        "runs": runs,
        "controls": controls,
    }


def _place(line: dict[str, Any]) -> tuple[int, bool, int]:
    """Cell by cell; the runs that choose learning rates stay as they came, all others have the order of the tricks."""
    chooses = line.get("part") == SWEEP
    return CELLS.index((line["task"], line["regime"])), not chooses, chooses or [*TRICKS].index(line["trick"])


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
    parser.add_argument("--output", type=Path, help="another folder for quality.json and quality.svg")
    parser.add_argument("--only", nargs="+", default=(), choices=[*TRICKS][1:], help="tricks; others stay as they are")
    args = parser.parse_args()
    folder = args.output or (RESULTS / "scratch" if args.reduced else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    runs = (args.output or RESULTS / "scratch") / ("quality, reduced" if args.reduced else "quality")
    scale, found = REDUCED if args.reduced else Scale(), []
    kept = json.loads((RESULTS / "quality.json").read_text()) if args.only else None
    sweep = kept["sweep"] if kept else []
    plain = {(each["task"], each["regime"]): each["lr"] for each in sweep if each["trick"] == PLAIN}
    gc.freeze()  # what is imported: ``compare`` collects garbage before every run
    for cell in CELLS:
        if only := [name for name in args.only or TRICKS if cell[0] in TRICKS[name].tasks]:
            tricks = {name: TRICKS[name] for name in dict.fromkeys([PLAIN, *only])}
            found.append(measure(*cell, scale, runs, tricks, plain.get(cell)))
        (folder / "quality.json").write_text(written(made := result(found, scale, kept, args.only)))
    quality_report.draw(folder / "quality.svg", made)
    if folder == RESULTS:
        quality_report.renew(made)
    else:
        print(quality_report.section(made))
    shutil.rmtree(runs)


if __name__ == "__main__":
    main()
