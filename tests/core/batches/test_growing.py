"""Inputs that grow: the size at every optimizer step, in fits of both callbacks."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.functional import growing_size
from tests.callbacks.test_mixup import feed
from tests.nets import Stream, assert_equal, build, fit, trainer, weights

FULL, STEPS = 64, 12


def naive_size(step: int, full: int, initial: float, start: int, stop: int, multiple_of: int) -> int:
    """By exact fractions: the nearest of all multiples."""
    if step >= stop or initial == 1:
        return full
    share = Fraction(initial) + (1 - Fraction(initial)) * Fraction(max(0, step - start), max(1, stop - start))
    multiples = range(1, full // multiple_of + 2)
    nearest = min(multiples, key=lambda n: abs(n * multiple_of - share * full))
    return min(full, nearest * multiple_of)


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (4, 7), (5, 5), (0, 0)])
@pytest.mark.parametrize("multiple_of", [1, 8, 32])
def test_the_size_is_that_of_the_formula_and_never_shrinks(multiple_of: int, start: int, stop: int) -> None:
    for full, initial in product((1, 7, 8, 30, 64, 100, 224, 513), (0.25, 0.5, 1.0, 1)):
        settings = {"full": full, "initial": initial, "start": start, "stop": stop, "multiple_of": multiple_of}
        slightly = settings | {"initial": min(1, initial + 1e-9)}  # of two multiples that are as near, either will do
        sizes = [growing_size(step, **settings) for step in range(14)]
        for step, size in enumerate(sizes):
            assert size in (naive_size(step, **settings), naive_size(step, **slightly))
        assert sizes == sorted(sizes)
        assert sizes[-1] == full
        assert all(size == full or size % multiple_of == 0 for size in sizes)


@pytest.mark.parametrize(
    ("error", "settings", "message"),
    [
        (ValueError, {"initial": 0}, r"initial must be in \(0, 1\], got 0"),
        (ValueError, {"initial": 1.1}, r"initial must be in \[0.0, 1.0\], got 1.1"),
        (TypeError, {"initial": "half"}, "initial must be a number .*, got 'half'"),
        (ValueError, {"multiple_of": 0}, "multiple_of must be at least 1, got 0"),
        (TypeError, {"multiple_of": 2.0}, "multiple_of must be an integer, got 2.0"),
    ],
)
@pytest.mark.parametrize("make", [growing_size, lt.ProgressiveResizing, lt.SequenceLengthWarmup])
def test_a_wrong_argument_is_refused(make: Any, error: Any, settings: dict[str, Any], message: str) -> None:
    needed = {"step": 0, "full": 8, "stop": 4, "initial": 0.5} if make is growing_size else {}
    with pytest.raises(error, match=message):
        make(**{**needed, **settings})


def test_the_end_is_not_before_the_beginning() -> None:
    with pytest.raises(ValueError, match="start must not be after stop, got start=5 and stop=4"):
        growing_size(0, full=8, initial=0.5, start=5, stop=4)
    with pytest.raises(ValueError, match=r"start must not be after stop, got start=0\.5 and stop=0.4"):
        lt.ProgressiveResizing(start=0.5, stop=0.4)
    growth = lt.ProgressiveResizing(start=5, stop=0.25, multiple_of=8)  # 3 of 12 steps
    with pytest.raises(
        MisconfigurationException, match=r"start=5 and stop=0\.25, optimizer steps 5 and 3: .* one unit"
    ):
        seen(growth)


# ---- in a fit


NOTED: list[tuple[int, tuple[int, ...]]] = []  # not the module's: that forgets SAM's second run, and the scoring


class Sized(L.LightningModule):
    """Notes the step and the size of each batch of images (B, 1, 64, 64) or tokens (B, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)
        self.validated: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.mean((1, 2, 3))[:, None] * self.words.weight[0] if x.ndim == 4 else self.words(x).mean(1)
        return self.head(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        NOTED.append((self.trainer.global_step, tuple(x.shape)))
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.add(tuple(batch[0].shape))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(growth: Any, batches: int = STEPS) -> list[Any]:
    numbers = torch.Generator().manual_seed(0)
    y = torch.arange(4) % 2
    if isinstance(growth, lt.ProgressiveResizing):
        return [(torch.rand(4, 1, FULL, FULL, generator=numbers), y) for _ in range(batches)]
    return [(torch.randint(10, (4, FULL), generator=numbers), y) for _ in range(batches)]


def seen(growth: Any, *others: Any, batches: int = STEPS, net: Any = Sized, **settings: Any) -> Any:
    """A module that has been fitted for an epoch with these callbacks."""
    given = feed(*samples(growth, batches))
    return noting(build(net), train=given, val=given, **{"max_epochs": 1, **settings, "callbacks": [growth, *others]})


def noting(module: Any, **settings: Any) -> Any:
    """The module after a fit, with what it has noted."""
    NOTED.clear()
    fit(module, **settings)
    module.noted = list(NOTED)
    return module


KINDS = [lt.ProgressiveResizing, lt.SequenceLengthWarmup]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_in_a_fit_are_those_of_the_formula_and_validation_is_full(kind: Any, accumulate: int) -> None:
    module = seen(kind(0.25, stop=9, multiple_of=4), batches=STEPS * accumulate, accumulate_grad_batches=accumulate)
    assert [step for step, _ in module.noted] == [step for step in range(STEPS) for _ in range(accumulate)]
    for step, shape in module.noted:
        assert {*shape[1:]} - {1} == {naive_size(step, FULL, 0.25, 0, 9, 4)}
    assert len({shape for _, shape in module.noted}) > 5
    assert {size for shape in module.validated for size in shape[1:]} - {1} == {FULL}


@pytest.mark.parametrize(("stop", "steps"), [(0.5, 6), (1.0, 12), (0, 0), (4, 4)])
def test_durations_are_steps_or_fractions_up_to_the_very_end(stop: float, steps: int) -> None:
    module = seen(lt.SequenceLengthWarmup(0.25, stop=stop, multiple_of=1))
    assert [shape[1] for _, shape in module.noted] == [
        naive_size(step, FULL, 0.25, 0, steps, 1) for step in range(STEPS)
    ]


def test_growth_waits_for_its_start() -> None:
    module = seen(lt.ProgressiveResizing(0.5, start=0.25, stop=0.75, multiple_of=2))
    assert [shape[-1] for _, shape in module.noted] == [naive_size(step, FULL, 0.5, 3, 9, 2) for step in range(STEPS)]


def test_a_fraction_of_a_training_of_unknown_length_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"SequenceLengthWarmup\(stop=0\.3\) is a fraction .* \(an int\)"
    ):
        seen(lt.SequenceLengthWarmup(), max_epochs=-1, max_steps=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_without_growth_the_length_of_the_training_may_be_unknown(kind: Any) -> None:
    given, module = Stream(samples(kind())), build(Sized)
    fit(module, train=given, max_epochs=1, limit_val_batches=0)
    for nothing in (kind(initial=1.0), lt.HardExampleFilter(keep=1.0, start=0.2)):
        tricked = noting(build(Sized), train=given, callbacks=[nothing], max_epochs=1, limit_val_batches=0)
        assert_equal(weights(tricked), weights(module))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_networks_meet_eight_sizes(kind: Any) -> None:
    module = seen(kind(0.25, stop=20, multiple_of=1), lt.Compile(backend="eager"), batches=22, limit_val_batches=0)
    sizes, plain = [shape[-1] for _, shape in module.noted], [naive_size(n, FULL, 0.25, 0, 20, 1) for n in range(22)]
    assert len(set(plain)) > 20
    assert len(set(sizes)) == 8
    assert sizes == sorted(sizes)
    assert all(small <= large for small, large in zip(sizes, plain, strict=True))
    assert sizes[0] == 16
    assert sizes[19] < FULL == sizes[20]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_after_an_interrupted_one_has_the_sizes_of_the_plan(kind: Any) -> None:
    growth, module = kind(0.25, stop=0.75, multiple_of=1), build(Sized)
    given, left = feed(*samples(growth)), iter([False] * (STEPS + 2) + [True])

    class Interrupts(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if next(left, False):
                raise KeyboardInterrupt

    run = trainer(max_epochs=2, callbacks=[growth, Interrupts()])
    with pytest.raises(SystemExit):
        run.fit(module, given, given)
    NOTED.clear()
    run.fit(module, given, given)  # the epoch that was interrupted begins again
    sizes = [naive_size(step, FULL, 0.25, 0, 18, 1) for step in range(STEPS, 2 * STEPS)]
    assert [shape[-1] for _, shape in NOTED] == sizes


class Sharp(lt.SAMMixin, Sized):
    sam = lt.SAM(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_sam_and_the_filter_see_the_smaller_batch(kind: Any) -> None:
    module = seen(kind(0.25, stop=9, multiple_of=4), lt.HardExampleFilter(0.5), net=Sharp, accumulate_grad_batches=2)
    for place in range(0, len(module.noted), 3):  # the scoring of all samples, and SAM's two runs of half of them
        (step, scored), *runs = module.noted[place : place + 3]
        assert scored == (4, *scored[1:])
        assert runs == [(step, (2, *scored[1:]))] * 2
        assert scored[-1] == naive_size(step, FULL, 0.25, 0, 9, 4)
    assert len(module.noted) == 3 * STEPS


def test_mixed_images_are_small_too() -> None:
    callbacks = [lt.Mixup(0.4, prob=0.5), lt.CutMix(prob=0.5)]
    module = seen(lt.ProgressiveResizing(0.25, stop=9, multiple_of=4), *callbacks)
    assert [shape[-1] for _, shape in module.noted] == [naive_size(step, FULL, 0.25, 0, 9, 4) for step in range(STEPS)]
