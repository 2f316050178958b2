"""A loader without a length, of a data set that is only iterated over, trains what one with a length trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.conformance.runs import refusal, run
from tests.conformance.settings import SETTINGS, quick
from tests.nets import NormNet, Stream, assert_equal, build, data, fit, weights

STEPS = 12  # of two epochs, which nothing else says


@pytest.mark.parametrize("name", quick("EMA", "HardExampleFilter", "LRSchedule", "SWA", "cosine"))
def test_a_loader_without_a_length_gives_the_same(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    last = trick.spoiled or trick.stops  # the bad batch is in the last epoch, which only max_epochs tells
    settings = {"max_epochs": 2 if last else -1, "max_steps": STEPS}
    if "iterable" in trick.refused:
        told = refusal(trick, train=DataLoader(Stream(data()), batch_size=8), **settings)
        assert name in told
        assert "IterableDataset" in told
        cell(name, "iterable", "refused", told)
        return
    streamed = run(trick, train=DataLoader(Stream(data()), batch_size=8), **settings)
    assert_equal(streamed, run(trick, **settings))
    cell(name, "iterable")


FIRST = r"^layers\.0"
# A trick whose times are optimizer steps, and the same with fractions of max_steps.
TIMES: dict[str, tuple[Callable[[], Callback], Callable[[], Callback]]] = {
    "BatchTransform": (
        lambda: lt.BatchTransform(lt.CutOut(0.5), start=3, stop=9),
        lambda: lt.BatchTransform(lt.CutOut(0.5), start=0.25, stop=0.75),
    ),
    "EMA": (lambda: lt.EMA(0.9, start=3), lambda: lt.EMA(0.9, start=0.25)),
    "GradualUnfreeze": (
        lambda: lt.GradualUnfreeze([3], parameters=[FIRST]),
        lambda: lt.GradualUnfreeze([0.25], parameters=[FIRST]),
    ),
    "HardExampleFilter": (
        lambda: lt.HardExampleFilter(start=3, stop=9),
        lambda: lt.HardExampleFilter(start=0.25, stop=0.75),
    ),
    "LayerFreezing": (
        lambda: lt.LayerFreezing(start=3, stop=9, parameters=[FIRST]),
        lambda: lt.LayerFreezing(start=0.25, stop=0.75, parameters=[FIRST]),
    ),
    "LRSchedule": (lambda: lt.LRSchedule("cosine", warmup=3), lambda: lt.LRSchedule("cosine", warmup=0.25)),
    "Mixup": (lambda: lt.Mixup(start=3, stop=9), lambda: lt.Mixup(start=0.25, stop=0.75)),
    "ProgressiveResizing": (
        lambda: lt.ProgressiveResizing(start=3, stop=9, multiple_of=1),
        lambda: lt.ProgressiveResizing(start=0.25, stop=0.75, multiple_of=1),
    ),
    "QAT": (lambda: lt.QAT(start=3), lambda: lt.QAT(start=0.25)),
    "SequenceLengthWarmup": (
        lambda: lt.SequenceLengthWarmup(stop=9, multiple_of=1, inputs=0),
        lambda: lt.SequenceLengthWarmup(stop=0.75, multiple_of=1, inputs=0),
    ),
    "SWA": (lambda: lt.SWA(start=3), lambda: lt.SWA(start=0.25)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", TIMES)
def test_fractions_are_those_of_max_steps(name: str) -> None:
    net = SETTINGS[name].plain(NormNet)
    ended = []
    for make in TIMES[name]:
        module = build(net)
        streamed = DataLoader(Stream(data()), batch_size=8)
        fit(module, train=streamed, callbacks=[make()], max_epochs=-1, max_steps=STEPS)
        ended.append(weights(module))
    assert_equal(*ended)
    assert any((ended[0][key] != value).any() for key, value in run(SETTINGS[name].bare(), max_steps=STEPS).items())
