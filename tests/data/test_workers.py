"""find_num_workers: as good as exhaustive timing, or it says noisy; it leaves loader and random numbers alone."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import lightning_tricks as lt
from lightning_tricks.data import WorkersResult
from lightning_tricks.data.workers import best_of, candidates, with_workers
from tests.callbacks.test_data_wait import Slow
from tests.nets import Stream, data
from tests.refusals import assert_refused


def found(num_workers: int, seconds: dict[int, float], **settings: Any) -> WorkersResult:
    settings = {"prefetch_factor": 2 if num_workers else None, "spread": 0.0, "cores": 4, **settings}
    return WorkersResult(num_workers, **settings, seconds=seconds)


@pytest.mark.slow
def test_a_loader_that_sleeps_gets_as_many_workers_as_it_needs() -> None:
    loader = DataLoader(Slow(0.015), 4)  # 60 ms in a batch
    result = lt.find_num_workers(loader, step_seconds=0.042, most=2, seconds=0.15, rounds=2)
    assert result.num_workers == 2 or result.noisy
    assert result.seconds.keys() == {0, 1, 2}
    assert result.seconds[0] > 0.096
    assert 0.042 < min(result.seconds.values()) < result.seconds[0]
    assert result.cores == lt.find_num_workers(DataLoader(data(8), 4), most=0, seconds=0.01).cores >= 1


def test_a_loader_that_is_fast_gets_none() -> None:
    result = lt.find_num_workers(DataLoader(data(64), 8), step_seconds=0.01, most=1, seconds=0.03, rounds=2)
    assert result.num_workers == 0 or result.noisy
    assert result.prefetch_factor is None


@pytest.mark.slow
@pytest.mark.parametrize("step_seconds", [0.0, 0.02, 0.06])
@pytest.mark.parametrize("computing", [False, True])
def test_it_is_as_good_as_the_best_of_an_exhaustive_timing(step_seconds: float, computing: bool) -> None:
    loader = DataLoader(Slow(0.005, 400, computing), 10)  # 50 ms in a batch
    result = lt.find_num_workers(loader, step_seconds=step_seconds)
    epochs = {}
    for workers in result.seconds:
        started = time.perf_counter()
        for _ in with_workers(loader, workers, 2):
            time.sleep(step_seconds)
        epochs[workers] = time.perf_counter() - started
    assert result.noisy or epochs[result.num_workers] <= 1.1 * min(epochs.values()), (str(result), epochs)


def test_the_loader_and_random_numbers_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = data(64)
    loader = DataLoader(samples, 8, sampler=RandomSampler(samples, generator=generator), num_workers=1)
    before, state, attributes = torch.get_rng_state(), generator.get_state(), dict(vars(loader))
    lt.find_num_workers(loader, most=1, seconds=0.02, rounds=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), state)
    assert vars(loader) == attributes


class Own(DataLoader[Any]):
    """A class of somebody's, with an argument more."""

    def __init__(self, more: str) -> None:
        super().__init__(data(64), 8)
        self.more = more


@pytest.mark.few(2)
@pytest.mark.parametrize("loader", [DataLoader(Stream(torch.ones(64, 2)), 8), Own("more"), DataLoader(data(9), None)])
def test_loaders_of_any_kind_are_timed(loader: Any) -> None:
    assert lt.find_num_workers(loader, most=1, seconds=0.02, rounds=2).seconds.keys() == {0, 1}


def test_the_fewest_workers_that_are_nearly_the_best_are_chosen() -> None:
    assert best_of({0: [3.0, 3.0], 1: [2.0, 2.0], 2: [1.04, 1.04], 4: [1.0, 1.0]}) == 2
    assert best_of({0: [1.0, 9.0, 1.0], 1: [1.1, 1.1, 1.1]}) == 0, "the median"
    assert candidates(0) == [0]
    assert candidates(9) == [*range(10)]


def test_what_it_says() -> None:
    assert str(found(2, {0: 0.04, 1: 0.02, 2: 0.01})).splitlines() == [
        "DataLoader(..., num_workers=2, persistent_workers=True)",
        "A step takes 10 ms, 4.0 times less than without workers (40 ms).",
    ]
    assert str(found(0, {0: 0.04, 1: 0.05})).splitlines() == [
        "DataLoader(..., num_workers=0)",
        "A step takes 40 ms, and workers do not make it shorter.",
    ]
    said = str(found(1, {0: 3.0, 1: 0.2}, prefetch_factor=4, spread=0.3, step_seconds=0.1, pin_memory=True))
    assert "persistent_workers=True, prefetch_factor=4, pin_memory=True)" in said
    assert "50% of it still waits for data" in said
    assert "This is noisy: the same setting differs by 30% between rounds." in said
    assert found(1, {0: 3.0, 1: 0.2}, spread=0.3).to_dict()["noisy"]


def test_wrong_values_are_refused() -> None:
    cases = [
        (ValueError, {"step_seconds": -1}, "step_seconds must be in"),
        (ValueError, {"most": -1}, "most must be at least 0"),
        (ValueError, {"rounds": 1}, "rounds must be at least 2"),
        (ValueError, {"seconds": -1}, "seconds must be in"),
    ]
    assert_refused(partial(lt.find_num_workers, DataLoader(data(8), 4)), cases)


def test_no_loader_and_one_without_batches_are_refused() -> None:
    with pytest.raises(TypeError, match="loader must be a torch DataLoader, got list"):
        lt.find_num_workers([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loader has no batches"):
        lt.find_num_workers(DataLoader(data(3), 8, drop_last=True), most=0)
