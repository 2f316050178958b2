"""A GPT-2 of 124 million weights from scratch, on documentation strings: optimizers, schedules, an average.

``python benchmarks/run.py --device cuda gpt``: sequences of 1,024 tokens of a byte-level BPE that is trained on that
of ``corpus.py``, 96 steps of 16 of them, three seeds, and a choice of learning rates in half of the length: some
5,000 steps with those that are timed, estimated at 25 minutes of an H100. Interrupted, it goes on. The text is small
for the network, several epochs of some million tokens: what is compared is how fast a loss falls, not how good a model
gets.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from corpus import described, load_documentation, sequences
from language_model import TRICKS, Shape, fit
from quality import neighbours
from quality_report import PLAIN
from rows import Row
from settings import Settings
from tables import RESULTS
from tuned import EPOCHS, Budget, cost_rows, measure

from lightning_tricks.examples.tasks import Split

NAME = "gpt"
PEERS = ("transformers", "tokenizers", "schedulefree", "timm")
SOME = (PLAIN, "cosine", "wsd", "cosine, EMA", "cosine, Muon", "ScheduleFree")


@cache
def load_tokens(strings: int | None, vocabulary: int, length: int, tested: int) -> Split:
    """Sequences of tokens of a BPE of the training text."""
    from tokenizers import ByteLevelBPETokenizer

    texts = load_documentation(strings)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts["train"].split("\n\n"), vocabulary, show_progress=False)
    parts = {}
    for part, text in texts.items():
        tokens, following = sequences(torch.tensor(tokenizer.encode(text).ids), length)
        most = len(tokens) if part == "train" else tested
        parts[part] = tokens[:most], following[:most]
    return parts


def run(settings: Settings) -> list[Row]:
    """Loss, gain, time, memory."""
    steps, seeds, sweep = settings.pick("budget", (96, 3, 48), (EPOCHS, 2, 0), (EPOCHS, 2, 0))
    full = Shape(12, 768, 12, length=1024, vocabulary=50257)
    small = Shape(1, 16, 2, length=16, vocabulary=300)
    shape = Shape(*settings.pick("shape", full, small, small))
    batch = settings.pick("batch", 16, 4, 4)
    strings = settings.pick("strings", None, 200, 100)
    names = settings.pick("tricks", SOME, SOME, (PLAIN, "cosine", "cosine, Muon"))
    settings.noted |= described(load_documentation(strings))
    load = partial(load_tokens, strings, shape.vocabulary, shape.length, 4 * batch)
    arm = partial(fit, load, shape, batch, settings.device)
    contenders = {}
    for name in names:
        made = TRICKS[name].contender(arm)
        contenders[name] = made._replace(lr=made.lr and neighbours(made.lr)[0])  # a larger network has a smaller rate
    folder = RESULTS / "scratch" / f"{NAME}, {settings.effort}, {settings.device}"
    folder.mkdir(parents=True, exist_ok=True)
    found = measure(contenders, Budget(steps, seeds, sweep), folder, metric="loss", device=settings.device)
    settings.noted["learning rates"] = found["sweep"]
    shutil.rmtree(folder)
    return cost_rows(found, "loss")


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """None: what comes out is not known."""
    return []
