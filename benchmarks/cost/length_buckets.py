"""Batches of similar lengths: LengthBuckets beside transformers' length-grouped sampler and plain shuffling.

``padding`` is the share of a batch's tokens that are padding, in an epoch; ``epoch`` is the time of one in a stock
Trainer, with a small transformer that computes padding like any other token; ``order`` is what the sampler itself takes
to draw the order of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import lightning as L
import torch
from fitted import QUIET, Net
from rows import Row, figure, ratio, row, rows_of, target
from settings import SEED, Settings
from timing import fits, in_turns, works
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

import lightning_tricks as lt

NAME = "length_buckets"
PEERS = ("transformers",)
SHUFFLED, OURS, PEER = "shuffled", "lightning_tricks LengthBuckets", "transformers LengthGroupedSampler"
BATCH, WIDTH = 16, 64


def drawn_lengths(samples: int, longest: int) -> list[int]:
    """As those of sentences: log-normal, a few of them long."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.empty(samples).log_normal_(3.5, 0.8, generator=generator)
    return lengths.long().clamp_(4, longest).tolist()


def samplers(lengths: list[int]) -> dict[str, Callable[[], Sampler[int]]]:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(SEED)

    return {
        SHUFFLED: lambda: RandomSampler(lengths, generator=seeded()),
        OURS: lambda: lt.LengthBuckets(lengths, BATCH, seed=SEED),
        PEER: lambda: LengthGroupedSampler(BATCH, lengths=lengths, generator=seeded()),
    }


class Reader(Net):
    """A transformer over tokens and padding."""

    def __init__(self, longest: int) -> None:
        super().__init__(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True))
        self.tokens, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        out = self.head(self.net(self.tokens(batch)).mean(1))
        return nn.functional.cross_entropy(out, batch[:, 0] % 4)


def padded(samples: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(samples), batch_first=True)


def batches(sampler: Sampler[int], lengths: Sequence[int]) -> list[list[int]]:
    """The lengths in every batch of an epoch."""
    loader = DataLoader(lengths, batch_size=BATCH, sampler=sampler, collate_fn=list)
    return list(loader)


def padding(sampler: Sampler[int], lengths: Sequence[int]) -> tuple[float, int]:
    """The share of padding in an epoch, and its steps."""
    found = batches(sampler, lengths)
    tokens = sum(len(batch) * max(batch) for batch in found)
    return 1 - sum(map(sum, found)) / tokens, len(found)


def epoch(make: Callable[[], Sampler[int]], data: list[Tensor], longest: int, device: str) -> float:
    """Microseconds of an epoch in a fit, the loader included."""
    torch.manual_seed(SEED)
    trainer = L.Trainer(accelerator=device, **QUIET)
    loader = DataLoader(data, batch_size=BATCH, sampler=make(), collate_fn=padded)
    module = Reader(longest)
    begin = perf_counter()
    trainer.fit(module, loader)
    return (perf_counter() - begin) * 1e6


def run(settings: Settings) -> list[Row]:
    """Padding, steps, an epoch, and an order."""
    samples: int = settings.pick("samples", 3200, 1600, 160)
    longest: int = settings.pick("longest", 256, 256, 64)
    lengths = drawn_lengths(samples, longest)
    data = [torch.randint(1, 100, (length,)) for length in lengths]
    made = samplers(lengths)
    counted = {name: padding(make(), lengths) for name, make in made.items()}
    found = [row("padding", name, [100 * share], "%") for name, (share, _) in counted.items()]
    found += [row("steps", name, [steps], "steps") for name, (_, steps) in counted.items()]
    timed = {name: partial(epoch, make, data, longest, settings.device) for name, make in made.items()}
    measured = in_turns(fits(timed), settings.pick("fits", 5, 1, 1), warm_up=0)
    found += rows_of("epoch", measured, SHUFFLED, "s")
    orders = {name: lambda make=make: lambda: batches(make(), lengths) for name, make in made.items()}
    return [
        *found,
        *rows_of("order", in_turns(works(orders, "cpu"), settings.pick("rounds", 15, 3, 1)), SHUFFLED, "ms"),
    ]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """No more padding and no more time than the peer, and as many steps as shuffled batches."""
    of = {(each, what): figure(rows, each, what) for each in ("padding", "steps") for what in (SHUFFLED, OURS, PEER)}
    faster = ratio(figure(rows, "epoch", OURS, "over_floor"), figure(rows, "epoch", PEER, "over_floor"))
    return [
        target("padding over the peer's", ratio(of["padding", OURS], of["padding", PEER]), "<=", 1.1),
        target("steps over those of shuffled batches", ratio(of["steps", OURS], of["steps", SHUFFLED]), "<=", 1.0),
        target("epoch over the peer's", faster, "<=", 1.05),
        target("epoch over a shuffled one", figure(rows, "epoch", OURS, "over_floor"), "<=", 0.8),
    ]
