"""A loader without a length, of a data set that is only iterated over, trains what one with a length trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.conformance.runs import run
from tests.conformance.settings import SETTINGS, quick
from tests.nets import assert_equal, data

STEPS = 12  # of two epochs, which nothing else says


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """The samples of ``loader()``, one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        samples = data()
        return (samples[index] for index in range(len(samples)))


@pytest.mark.parametrize("name", quick("EMA", "HardExampleFilter", "LRSchedule", "SWA", "cosine"))
def test_a_loader_without_a_length_gives_the_same(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    last = trick.spoiled or trick.stops  # the bad batch is in the last epoch, which only max_epochs tells
    settings = {"max_epochs": 2 if last else -1, "max_steps": STEPS}
    streamed = run(trick, train=DataLoader(Stream(), batch_size=8), **settings)
    assert_equal(streamed, run(trick, **settings))
    cell(name, "iterable")
