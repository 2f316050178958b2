"""A language model of a million weights on bytes of real documentation: optimizers, schedules and averages.

``nice python benchmarks/language_model.py`` (some five hours of one core; ``--reduced`` tries it for a few steps).
The text is that of ``corpus.py``: the documentation strings of Python's library and of numpy, whose licences and bytes
are in the result. The network is the GPT-2 of transformers: three layers of 168 features, sequences of 128 bytes.

All train for 1,000 steps of 8 sequences, with gradients clipped to a norm of 1 and a warm-up of a twentieth, as
language models are trained. AdamW at a constant rate is plain training; each optimizer has a rate of its own, chosen in
a quarter of the length (``tuned.py``), and the other optimizers have the cosine beside which they were proposed.
Averages have plain training's rate, other schedules the cosine's. A quarter may choose too small a rate for the whole:
all also have three times of it, and ten times where three are better, and are compared at the best, by validation.
Muon trains embeddings by AdamW at its own rate, which is some ten times that of plain AdamW: *both rates* is AdamW with
ten times its rate for them, and Muon with a tenth. An optimizer that is worse than its paper has it is also run *as
published*, in the configuration of the paper or of a public program (``PUBLISHED``). SAM, whose step takes twice as
long, has half of the steps. The loss is in nats per byte; ``curves`` has the mean training loss and the seconds of
every fortieth of training, for ``language_model.svg``.

It can be run bit by bit: ``--only cosine "cosine, Muon"`` measures these, beside plain training, and leaves out what
``results/runs/language_model.json`` has of an earlier session (``kept_runs.py``). The result is written after every
contender, and has those that are measured.
"""

from __future__ import annotations

import argparse
import gc
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import finetune_report
import lightning as L
import torch
import torch.nn.functional as F
from corpus import byte_sequences, described, load_documentation
from finetune_report import Words
from fit_curve import TrainingCurve, curves
from kept_runs import kept_runs
from lightning.pytorch.callbacks import Callback
from quality import Recipe
from quality_report import PLAIN, interval, paired
from rows import written
from tables import RESULTS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tuned import EPOCHS, Budget, Contender, Trick, at_rates, best_rates, finals_of, measure, shuffled, some, table

import lightning_tricks as lt
from lightning_tricks.examples.tasks import QUIET, Split
from lightning_tricks_cli.runs.demo import small_runs

TITLE = "A small GPT learns documentation from scratch"
WEIGHT_DECAY, CLIP, WARMUP, BETAS = 0.1, 1.0, 0.05, (0.9, 0.95)
OPTIMIZER = {"weight decay": WEIGHT_DECAY, "clip": CLIP, "warm-up": WARMUP, "betas": BETAS}
SNAPSHOTS = "snapshots"  # the folder of those of PostHocEMA, in that of a run


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


FULL = Scale(Budget(1000, 3, 248), Shape(3, 168, 6), batch=8, tested=512)
REDUCED = Scale(Budget(EPOCHS, 2, 0), Shape(1, 16, 2, length=16), batch=4, tested=8, strings=200)


class PostHocLength(Callback):
    """Ends a fit of ``PostHocEMA`` with the average whose length has the lowest validation loss."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / SNAPSHOTS

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose, and remove the snapshots."""
        pl_module.eval()
        sweep = lt.post_hoc_sweep(self._folder, partial(_validated, trainer, pl_module), mode="min")
        average = lt.post_hoc_average(self._folder, sigma_rel=sweep.best)
        pl_module.load_state_dict(average, strict=False)
        pl_module.train()
        shutil.rmtree(self._folder)


@torch.no_grad()
def _validated(trainer: L.Trainer, module: L.LightningModule, average: dict[str, Tensor]) -> float:
    """The loss of an average on the validation sequences."""
    module.load_state_dict(average, strict=False)
    losses = [
        module.loss_of([each.to(module.device) for each in batch]) for batch in trainer.datamodule.val_dataloader()
    ]
    return float(torch.stack(losses).mean())


def in_folder(callbacks: Sequence[Any], folder: Path) -> list[Callback]:
    """Callbacks, of which some are made from the folder of the run."""
    return [each if isinstance(each, Callback) else each(folder) for each in callbacks]


def scheduled(name: str, *others: Any, **settings: Any) -> Recipe:
    """With a learning-rate schedule after a warm-up."""
    return Recipe((lt.LRSchedule(name, warmup=WARMUP), *others), **settings)


PUBLISHED: dict[str, dict[str, Any]] = {
    "lion": {"betas": (0.95, 0.98), "weight_decay": 1.0},  # its section 5: language models, ten times AdamW's decay
    "ademamix": {"betas": (0.9, 0.999, 0.999), "alpha": 8.0},  # in scripts of arXiv 2509.01440's program
}


def snapshots(folder: Path) -> Callback:
    """The callback, with its snapshots in the folder of a run."""
    return lt.PostHocEMA(folder / SNAPSHOTS)


def as_published(optimizer: str) -> dict[str, Any]:
    """The arguments of a recipe with an optimizer in the configuration of its paper, or of a public program."""
    return {"optimizer": optimizer, "settings": {"published": PUBLISHED[optimizer]}}


TRICKS = {
    **at_rates(PLAIN, Trick(lambda: scheduled("constant"), lr=1e-3), 3.0, 10.0),
    **at_rates("plain, twice the steps", Trick(lambda: scheduled("constant", epochs=2.0)), 3.0, 10.0),
    **at_rates("cosine", Trick(lambda: scheduled("cosine"), lr=3e-3), 3.0, 10.0),
    **at_rates("wsd", Trick(lambda: scheduled("wsd"), rate_of="cosine"), 3.0, 10.0),
    **at_rates("flat_cos", Trick(lambda: scheduled("flat_cos"), rate_of="cosine"), 3.0, 10.0),
    **at_rates("EMA", Trick(lambda: scheduled("constant", lt.EMA())), 3.0, 10.0),
    **at_rates("PostHocEMA", Trick(lambda: scheduled("constant", snapshots, PostHocLength)), 3.0, 10.0),
    **at_rates("cosine, EMA", Trick(lambda: scheduled("cosine", lt.EMA()), rate_of="cosine"), 3.0, 10.0),
    **at_rates(
        "cosine, SequenceLengthWarmup",
        Trick(lambda: scheduled("cosine", lt.SequenceLengthWarmup()), rate_of="cosine"),
        3.0,
        10.0,
    ),
    **at_rates(
        "cosine, SAM, half the steps",
        Trick(lambda: scheduled("cosine", lt.SAMCallback(), epochs=0.5), rate_of="cosine"),
        3.0,
    ),
    **at_rates(
        "cosine, both rates",
        Trick(lambda: scheduled("cosine", settings={"others": 10.0}), rate_of="cosine"),
        3.0,
        10.0,
    ),
    **at_rates("cosine, Muon", Trick(lambda: scheduled("cosine", optimizer="muon"), lr=1e-2), 3.0),
    "cosine, Muon, both rates": Trick(
        lambda: scheduled("cosine", optimizer="muon", settings={"others": 0.1}), rate_of="cosine, Muon"
    ),
    **at_rates("cosine, SOAP", Trick(lambda: scheduled("cosine", optimizer="soap"), lr=3e-3), 3.0),
    **at_rates("cosine, Lion", Trick(lambda: scheduled("cosine", optimizer="lion"), lr=3e-4), 3.0, 10.0),
    **at_rates("cosine, Lion as published", Trick(lambda: scheduled("cosine", **as_published("lion")), lr=3e-4), 3.0),
    **at_rates("cosine, AdEMAMix", Trick(lambda: scheduled("cosine", optimizer="ademamix"), lr=3e-3), 3.0),
    **at_rates(
        "cosine, AdEMAMix as published", Trick(lambda: scheduled("cosine", **as_published("ademamix")), lr=3e-3), 3.0
    ),
    **at_rates(
        "ScheduleFree", Trick(lambda: Recipe((lt.ScheduleFree(),), optimizer="schedulefree_adamw"), lr=3e-3), 3.0, 10.0
    ),
}
SEE = "As the cosine; see the gains over it."
WHY = {
    "cosine": "In so short a training a rate that stays high until shortly before the end is better: wsd, flat_cos.",
    **dict.fromkeys(("cosine, EMA", "cosine, Lion", "cosine, Lion as published"), SEE),
    "cosine, SAM, half the steps": "The paper gives plain training twice the epochs instead (arXiv 2010.01412).",
    "cosine, AdEMAMix": "Its averages of ten thousand steps are for longer training (arXiv 2409.03137).",
    "cosine, AdEMAMix as published": "Averages of a thousand steps; programs that have them train for 8,000 and more.",
}  # of those that are worse


class Network(nn.Module):
    """The GPT-2 of transformers, from tokens (B, T) to logits (B, T, C)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        size = {"n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads, "n_positions": shape.length}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=shape.vocabulary,
                use_cache=False,
                activation_function="gelu_pytorch_tanh",  # that of GPT-2, in one operation
                **size,
                **dropout,
                **special,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits at every place, from the tokens up to it."""
        return self.model(input_ids=tokens).logits


class Language(L.LightningModule):
    """Trains a network to predict the next token."""

    def __init__(self, network: nn.Module, name: str, lr: float) -> None:
        super().__init__()
        self.network, self.name, self.lr = network, name, lr

    def loss_of(self, batch: Sequence[Tensor]) -> Tensor:
        """Cross entropy in nats."""
        tokens, following = batch
        return F.cross_entropy(self.network(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of training."""
        return self.loss_of(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same of the validation sequences."""
        self.log("val_loss", self.loss_of(batch))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same of the test sequences."""
        self.log("test_loss", self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        """The optimizer of that name."""
        return self.optimizer_of({})

    def optimizer_of(self, settings: dict[str, Any]) -> Any:
        """The optimizer of that name, with further settings.

        AdamW has the second beta of language models, ScheduleFree the warm-up of the others, and AdEMAMix the decoupled
        weight decay of the others and the warm-up of its paper.
        """
        steps = float(self.trainer.estimated_stepping_batches)
        further: dict[str, Any] = {
            "adamw": {"betas": BETAS},
            "schedulefree_adamw": {"warmup_steps": round(WARMUP * steps)},
            "ademamix": {"weight_decouple": True, "t_alpha_beta3": steps},
        }.get(self.name, {})
        return lt.optimizer(self.name, self, self.lr, **{"weight_decay": WEIGHT_DECAY, **further, **settings})


class TwoRates(Language):
    """The same by Muon, or AdamW, with ``others`` times the rate for what is no hidden matrix."""

    def __init__(self, network: nn.Module, name: str, lr: float, others: float) -> None:
        super().__init__(network, name, lr)
        self.others = others

    def configure_optimizers(self) -> Any:
        """Muon with its own AdamW, or AdamW for all in the groups that Muon has."""
        muon = lt.optimizer("muon", self, self.lr, weight_decay=WEIGHT_DECAY, adamw_lr=self.others * self.lr)
        if self.name == "muon":
            return muon
        groups = [{key: each[key] for key in ("params", "lr", "weight_decay")} for each in muon.param_groups]
        return torch.optim.AdamW(groups, betas=BETAS)


class Published(Language):
    """The same by an optimizer in the configuration of its paper, or of a public program."""

    def __init__(self, network: nn.Module, name: str, lr: float, published: dict[str, Any]) -> None:
        super().__init__(network, name, lr)
        self.published = published

    def configure_optimizers(self) -> Any:
        """The optimizer of that name in that configuration."""
        return self.optimizer_of(self.published)


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
        sampler = shuffled(self.data["train"], self.batch, self.trainer)
        return DataLoader(self.data["train"], self.batch, sampler=sampler, drop_last=True)

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
    shape: Shape,
    batch: int,
    device: str,
    recipe: Callable[[], Recipe],
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
        gradient_clip_val=CLIP,
        callbacks=[TrainingCurve(folder), *in_folder(made.callbacks, folder)],
        **options,
    )
    kind = {"others": TwoRates, "published": Published}.get(next(iter(made.settings), ""), Language)
    module = kind(Network(shape), made.optimizer or "adamw", lr, **made.settings)
    return trainer, module, Sequences(load, batch)


def contenders(scale: Scale) -> dict[str, Contender]:
    """All of them."""
    arm = partial(fit, partial(load_bytes, scale), scale.shape, scale.batch, "cpu")
    return {name: trick.contender(arm) for name, trick in TRICKS.items()}


def settings_of(scale: Scale) -> dict[str, Any]:
    """What all runs depend on."""
    weights = sum(weight.numel() for weight in Network(scale.shape).parameters())
    settings = {"budget": scale.budget._asdict(), "shape": scale.shape._asdict(), "batch": scale.batch}
    settings |= {"weights": weights, "test sequences": scale.tested, **OPTIMIZER}
    return settings | described(load_documentation(scale.strings))


def result(made: dict[str, list[Any]], drawn: list[dict[str, Any]], scale: Scale) -> dict[str, Any]:
    """The figures."""
    missing = [name for name in TRICKS if name not in {row["trick"] for row in made["rows"]}]
    settings = settings_of(scale) | {"published": PUBLISHED, "not measured": missing}
    return {"benchmark": "language_model", "settings": settings, **made, "curves": drawn}


def section(made: dict[str, Any]) -> str:
    """The part of the README."""
    settings = made["settings"]
    budget, text = settings["budget"], settings["bytes"]["train"] / 1e6
    scale = (
        f"AdamW at the best constant rate after a warm-up is plain training; {text:.1f} MB of documentation, in bytes;"
        f" {settings['weights'] / 1e6:.1f} million weights, {budget['steps']:,} steps of {settings['batch']} sequences"
        f" of {settings['shape']['length']}, {budget['seeds']} seeds; learning rates chosen in {budget['sweep_steps']}"
        " steps"
    )
    points = "Hundredths of a nat per byte; a positive difference is a lower loss"
    picture = "Training loss against steps and against seconds"
    words = Words(TITLE, scale, WHY, points, "hundredths of a nat", told_over_cosine(made), picture)
    return finetune_report.section(made, words)


def told_over_cosine(made: dict[str, Any]) -> str:
    """What is told of these gains."""
    found = sorted(over_cosine(made).items(), key=lambda each: -each[1]["points"])
    told = [f"{name.removeprefix('cosine, ')} {interval(gain)}" for name, gain in found]
    return f"- **Over AdamW with the best cosine.** {'; '.join(told)}." * bool(told)


def over_cosine(made: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The gains of what has a cosine over AdamW with one, each at the best of its rates, by validation."""
    finals, best = finals_of(made["runs"]), best_rates(made["runs"])
    names = [name for short, name in best.items() if short.startswith("cosine, ") and "cosine" in best]
    return {name: paired(finals[name], finals[best["cosine"]], "test_loss", -100) for name in names}


def draw(path: Path, made: dict[str, Any]) -> None:
    """The training loss of the first seed, against steps and against seconds, of what is compared but for averages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    told = {name for short, name in best_rates(made["runs"]).items() if not short.endswith("EMA")}
    shown = [each for each in made["curves"] if each["seed"] == 0 and each["trick"] in told]
    for place, curve in enumerate(shown):
        steps, seconds, losses = zip(*curve["points"], strict=True)
        for axis, along in zip(axes, (steps, seconds), strict=True):
            axis.plot(along, losses, label=curve["trick"], linewidth=1, **finetune_report.look(place))
    axes[0].set(xlabel="steps", ylabel="training loss (nats per byte)")
    axes[1].set(xlabel="seconds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right", fontsize=7, frameon=False)
    finetune_report.save(figure, path)


def main() -> None:
    """Run, write and print after every contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="a few steps, into results/scratch")
    parser.add_argument("--only", nargs="+", choices=[*TRICKS][1:], help="contenders; others stay as they are")
    args = parser.parse_args()
    scale, output, kept = (REDUCED, RESULTS / "scratch", None) if args.reduced else (FULL, RESULTS, RESULTS / "runs")
    folder = RESULTS / "scratch" / f"language model{', reduced' if args.reduced else ''}"
    file = kept and kept / "language_model.json"
    gc.freeze()  # what is imported: ``compare`` collects garbage before every run
    with small_runs(), kept_runs(folder, file, settings_of(scale)) as runs:  # of one thread
        for name in args.only or [*TRICKS][1:]:
            made = measure(some(contenders(scale), [name], runs), scale.budget, runs, metric="loss")
            found = result(made, curves(runs), scale)
            (output / "language_model.json").write_text(written(found))
            draw(output / "language_model.svg", found)
            print(table(found["rows"]), flush=True)
            if output == RESULTS:
                finetune_report.renew("language_model", section(found))


if __name__ == "__main__":
    main()
