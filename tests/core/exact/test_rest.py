"""The samples that are left are those that a loader of the earlier settings would still give."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

import lightning_tricks as lt
from lightning_tricks.core.exact.rest import batches_of, describe, samples_left

SIZE = 23


def sampler_of(kind: str, rank: int, ranks: int, drop: bool) -> Any:
    if kind == "buckets":
        return lt.LengthBuckets([1 + number % 5 for number in range(SIZE)], 2, pool=2, drop_last=drop)
    sampler = DistributedSampler(range(SIZE), ranks, rank, shuffle=kind == "shuffled", seed=3, drop_last=drop)  # type: ignore[arg-type]
    sampler.set_epoch(2)
    return sampler


def of_ranks(kind: str, ranks: int, drop: bool) -> list[list[list[int]]]:
    """The batches of all ranks."""
    if kind == "buckets":
        cut = sampler_of(kind, 0, ranks, drop).batches_of_ranks(2, ranks)
        return [[batch.tolist() for batch in cut[rank::ranks]] for rank in range(ranks)]
    return [[*BatchSampler(sampler_of(kind, rank, ranks, drop), 2, drop)] for rank in range(ranks)]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "buckets"])
def test_what_is_left_are_the_samples_of_the_batches_behind(kind: str, drop: bool) -> None:
    for ranks, batches in product((1, 2, 3), range(4)):
        sampler = sampler_of(kind, 0, ranks, drop)
        loader = DataLoader(range(SIZE), 2, sampler=sampler, drop_last=drop)  # type: ignore[arg-type]
        part = describe(loader, ranks, epoch=2)
        left = samples_left({"part": part, "batches": batches, "states": {}}, sampler)
        whole = of_ranks(kind, ranks, drop)
        seen = {number for rank in whole for batch in rank[:batches] for number in batch}
        behind = {number for rank in whole for batch in rank[batches:] for number in batch}
        assert len({*left.tolist()}) == len(left)
        assert behind - seen <= {*left.tolist()}
        assert not seen & {*left.tolist()}
        assert drop or {*left.tolist()} | seen == {*range(SIZE)}


@pytest.mark.parametrize(("drop", "size"), [*product([False, True], [None, 1, 4])])
def test_every_rank_gets_the_same_number_of_batches(drop: bool, size: int | None) -> None:
    for ranks, count in product((1, 2, 3), (0, 1, 5, 12)):
        left = torch.arange(count) + 5
        loader: Any = DataLoader(range(SIZE), size, sampler=sampler_of("in order", 0, ranks, drop))  # type: ignore[arg-type]
        dealt = [batches_of(describe(loader, ranks, 0), left, None, rank) for rank in range(ranks)]
        assert len({len(batches) for batches in dealt}) == 1
        assert dealt[0]
        numbers = [number for batches in dealt for batch in batches for number in ([batch] if size is None else batch)]
        assert not count or {*numbers} <= {*left.tolist()}
        if not drop:
            assert {*left.tolist()} <= {*numbers}
            assert len(numbers) - max(count, 1) < ranks


def test_the_order_of_a_shuffled_loader_is_that_of_its_state() -> None:
    state = torch.get_rng_state()
    order = [*RandomSampler(range(SIZE))]
    loader: Any = DataLoader(range(SIZE), 4, shuffle=True)  # type: ignore[arg-type]
    turn = {
        "part": describe(loader, 1, 0),
        "batches": 2,
        "states": {"first": {"random": {"torch": state}, "own": {}}},
    }
    assert samples_left(turn, None).tolist() == order[8:]
