"""A language model of 1.9 million weights on bytes of real documentation: optimizers, schedules and averages.

``nice python benchmarks/language_model.py`` (some twelve hours of one core; ``--reduced`` tries it for a few steps).
The text is that of ``corpus.py``: the documentation strings of Python's library and of numpy, whose licences and bytes
are in the result. The network is the GPT-2 of transformers with four layers of 192 features, on sequences of 128 bytes.

All train for 1,000 steps of 32 sequences. AdamW at a constant rate is plain training; each optimizer has a rate of its
own, chosen in a quarter of the length (``tuned.py``), and the other optimizers have the cosine beside which they were
proposed. SAM, whose step takes twice as long, has half of the steps. The loss is in nats per byte; ``curves`` has the
mean training loss and the seconds of every fortieth of training, for the picture ``language_model.svg``.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import lightning as L
import torch
import torch.nn.functional as F
from corpus import byte_sequences, described, load_documentation
from lightning.pytorch.callbacks import Callback
from machine import lent
from quality import Recipe
from quality_report import PLAIN
from rows import written
from tables import RESULTS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tuned import EPOCHS, FINALS, Budget, Contender, measure, table

import lightning_tricks as lt
from lightning_tricks.examples.tasks import QUIET, Split
from lightning_tricks_cli.runs.demo import small_runs

CURVE = "curve.json"
WEIGHT_DECAY = 0.1


class Shape(NamedTuple):
    """The network and its inputs."""

    layers: int
    width: int
    heads: int
    length: int = 128
    vocabulary: int = 256


class Scale(NamedTuple):
    """How much is run."""

    budget: Budget
    shape: Shape
    batch: int
    tested: int  # sequences of validation, and as many of the test
    strings: int | None = None  # of each source; None: all


FULL = Scale(Budget(1000, 3, 248), Shape(4, 192, 6), batch=32, tested=512)
REDUCED = Scale(Budget(EPOCHS, 2, 0), Shape(1, 16, 2, length=16), batch=4, tested=8, strings=200)


class Trick(NamedTuple):
    """A contender: what it changes, and its learning rate as ``tuned.Contender`` has it."""

    recipe: Callable[[], Recipe]
    lr: float | None = None
    rate_of: str = PLAIN


def scheduled(name: str, *others: Any, **settings: Any) -> Recipe:
    """With a learning-rate schedule after a warm-up of a twentieth."""
    return Recipe((lt.LRSchedule(name, warmup=0.05), *others), **settings)


TRICKS = {
    PLAIN: Trick(Recipe, lr=1e-3),
    "plain, twice the steps": Trick(lambda: Recipe(epochs=2.0)),
    "cosine": Trick(lambda: scheduled("cosine"), lr=3e-3),
    "wsd": Trick(lambda: scheduled("wsd"), rate_of="cosine"),
    "flat_cos": Trick(lambda: scheduled("flat_cos"), rate_of="cosine"),
    "EMA": Trick(lambda: Recipe((lt.EMA(),))),
    "cosine, EMA": Trick(lambda: scheduled("cosine", lt.EMA()), rate_of="cosine"),
    "cosine, SequenceLengthWarmup": Trick(lambda: scheduled("cosine", lt.SequenceLengthWarmup()), rate_of="cosine"),
    "cosine, SAM, half the steps": Trick(lambda: scheduled("cosine", lt.SAMCallback(), epochs=0.5), rate_of="cosine"),
    "cosine, Muon": Trick(lambda: scheduled("cosine", optimizer="muon"), lr=1e-2),
    "cosine, Lion": Trick(lambda: scheduled("cosine", optimizer="lion"), lr=3e-4),
    "cosine, SOAP": Trick(lambda: scheduled("cosine", optimizer="soap"), lr=3e-3),
    "cosine, AdEMAMix": Trick(lambda: scheduled("cosine", optimizer="ademamix"), lr=3e-3),
    "ScheduleFree": Trick(lambda: Recipe((lt.ScheduleFree(),), optimizer="schedulefree_adamw"), lr=3e-3),
}


class Network(nn.Module):
    """The GPT-2 of transformers, from tokens (B, T) to logits (B, T, C)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        size = {"n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads, "n_positions": shape.length}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=shape.vocabulary, use_cache=False, **size, **dropout, **special)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits at every place, from the tokens up to it."""
        return self.model(input_ids=tokens).logits


class Language(L.LightningModule):
    """Trains a network to predict the next token."""

    def __init__(self, network: nn.Module, name: str, lr: float) -> None:
        super().__init__()
        self.network, self.name, self.lr = network, name, lr

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.network(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy in nats."""
        return self._loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same of the validation sequences."""
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same of the test sequences."""
        self.log("test_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        """The optimizer of that name; AdamW with the second beta of language models."""
        further = {"betas": (0.9, 0.95)} if self.name == "adamw" else {}
        return lt.optimizer(self.name, self, self.lr, weight_decay=WEIGHT_DECAY, **further)


class Curve(Callback):
    """Keeps the mean training loss and the seconds so far of every fortieth of training, in a file of the run."""

    def __init__(self, folder: Path, points: int = 40) -> None:
        self._path, self._points = folder / CURVE, points

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin."""
        self._begin, self._sum, self._steps = time.perf_counter(), torch.zeros((), device=pl_module.device), 0
        self._found: list[tuple[int, float, float]] = []
        self._every = max(1, int(trainer.estimated_stepping_batches) // self._points)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Add the loss; the device is waited for at a point alone."""
        self._sum += outputs["loss"].detach()
        self._steps += 1
        if self._steps == self._every:
            mean = round(float(self._sum) / self._steps, 4)
            self._found.append((trainer.global_step, round(time.perf_counter() - self._begin, 2), mean))
            self._sum, self._steps = torch.zeros_like(self._sum), 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found))


class Sequences(L.LightningDataModule):
    """Sequences of tokens and of those that follow them."""

    def __init__(self, load: Callable[[], Split], batch: int) -> None:
        super().__init__()
        self.load, self.batch = load, batch

    def setup(self, stage: str) -> None:
        """The data, read once."""
        self.data = {part: TensorDataset(*tensors) for part, tensors in self.load().items()}

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches in a new order in every epoch."""
        return DataLoader(self.data["train"], self.batch, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """In batches of the same size."""
        return DataLoader(self.data["val"], self.batch)

    def test_dataloader(self) -> DataLoader[Any]:
        """In batches of the same size."""
        return DataLoader(self.data["test"], self.batch)


def load_bytes(scale: Scale) -> Split:
    """Sequences of bytes of each part."""
    parts = {}
    for part, text in load_documentation(scale.strings).items():
        tokens, following = byte_sequences(text, scale.shape.length)
        most = len(tokens) if part == "train" else scale.tested
        parts[part] = tokens[:most], following[:most]
    return parts


def fit(
    load: Callable[[], Split],
    recipe: Callable[[], Recipe],
    shape: Shape,
    batch: int,
    device: str,
    lr: float,
    steps: int,
    folder: Path,
) -> tuple[Any, ...]:
    """An arm: Trainer, module and data."""
    made = recipe()
    options = {**QUIET, "accelerator": device, "precision": "bf16-mixed" if device == "cuda" else "32-true"}
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        limit_train_batches=max(1, steps // EPOCHS),
        check_val_every_n_epoch=EPOCHS + 1,  # ``compare`` validates after the fit
        callbacks=[Curve(folder), *made.callbacks],
        **options,
    )
    return trainer, Language(Network(shape), made.optimizer or "adamw", lr), Sequences(load, batch)


def contenders(scale: Scale) -> dict[str, Contender]:
    """All of them."""
    arm = partial(fit, partial(load_bytes, scale))
    return {
        name: Contender(
            partial(arm, trick.recipe, scale.shape, scale.batch, "cpu"),
            trick.lr,
            trick.rate_of,
            trick.recipe().epochs,
        )
        for name, trick in TRICKS.items()
    }


def curves(folder: Path) -> list[dict[str, Any]]:
    """The curves of the final runs: steps, seconds, mean training loss."""
    found = sorted((folder / FINALS).glob(f"*/seed*/{CURVE}"))
    return [
        {
            "trick": unquote(path.parent.parent.name),
            "seed": int(path.parent.name.removeprefix("seed")),
            "points": json.loads(path.read_text()),
        }
        for path in found
    ]


def result(made: dict[str, list[Any]], drawn: list[dict[str, Any]], scale: Scale) -> dict[str, Any]:
    """The figures."""
    weights = sum(weight.numel() for weight in Network(scale.shape).parameters())
    settings = {"budget": scale.budget._asdict(), "shape": scale.shape._asdict(), "batch": scale.batch}
    settings |= {"weights": weights, "test sequences": scale.tested, **described(load_documentation(scale.strings))}
    packages = ("lightning-tricks", "transformers", "numpy", "schedulefree", "timm", "pytorch-optimizer")
    return {
        "benchmark": "language_model",
        "machine": lent("cpu", *packages),
        "settings": settings,
        **made,
        "curves": drawn,
    }


def draw(path: Path, made: dict[str, Any]) -> None:
    """The training loss of the first seed, against steps and against seconds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for curve in (each for each in made["curves"] if each["seed"] == 0):
        steps, seconds, losses = zip(*curve["points"], strict=True)
        for axis, along in zip(axes, (steps, seconds), strict=True):
            axis.plot(along, losses, label=curve["trick"], linewidth=1)
    axes[0].set(xlabel="steps", ylabel="training loss (nats per byte)")
    axes[1].set(xlabel="seconds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right", fontsize=7, frameon=False)
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None}, facecolor="white")


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="a few steps, into results/scratch")
    args = parser.parse_args()
    scale, output = (REDUCED, RESULTS / "scratch") if args.reduced else (FULL, RESULTS)
    runs = RESULTS / "scratch" / f"language model{', reduced' if args.reduced else ''}"
    runs.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # what is imported: ``compare`` collects garbage before every run
    with small_runs():  # of one thread
        made = measure(contenders(scale), scale.budget, runs, metric="loss")
    found = result(made, curves(runs), scale)
    (output / "language_model.json").write_text(written(found))
    draw(output / "language_model.svg", found)
    print(table(found["rows"]))
    shutil.rmtree(runs)


if __name__ == "__main__":
    main()
