"""What the losses of a sweep suggest: on curves in closed form, on a real fit, and with noise on both."""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import matplotlib as mpl
import pytest
import torch

from lightning_tricks.schedules.lr_finder import LRFinderResult, find_lr, smoothed_losses, suggested_lr
from tests.nets import Net, build, loader, trainer

METHODS = ("valley", "steepest", "minimum/10")


def rates(steps: int = 100, low: float = 1e-8, high: float = 1.0) -> list[float]:
    return [low * (high / low) ** (k / (steps - 1)) for k in range(steps)]


def curve(lrs: list[float]) -> list[float]:
    """Flat, a fall by 0.8 about 1e-3, and a rise that explodes from 0.1 on."""
    return [0.2 + 0.8 / (1 + (lr / 1e-3) ** 1.5) + math.expm1(min(50.0, 20 * lr)) for lr in lrs]


def noisy(losses: Any, size: float, seed: int) -> list[float]:
    numbers = random.Random(seed)
    return [loss + size * numbers.gauss(0, 1) for loss in losses]


# -- smoothing --------------------------------------------------------------------------------------------------------


def test_smoothing_is_the_mean_that_the_formula_says() -> None:
    losses, h = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0], 2.0
    weights = [[math.exp(-((i - j) ** 2) / (2 * h * h)) for j in range(6)] for i in range(6)]
    expected = [sum(w * loss for w, loss in zip(row, losses, strict=True)) / sum(row) for row in weights]
    assert smoothed_losses(rates(6), losses) == pytest.approx(expected)


def test_smoothing_keeps_a_straight_line_and_follows_the_spacing() -> None:
    lrs = rates(1000)
    line = [math.log10(lr) for lr in lrs]
    inside = slice(130, -130)  # 4 bandwidths from the ends
    assert smoothed_losses(lrs, line)[inside] == pytest.approx(line[inside])
    thousand, hundred = (noisy([1.0] * n, 0.1, 0) for n in (1000, 100))
    spread = torch.tensor(smoothed_losses(lrs, thousand)).std() / torch.tensor(smoothed_losses(rates(), hundred)).std()
    assert spread < 0.6  # as many more losses in the same range of learning rates: 1/sqrt(10), loosely


@pytest.mark.parametrize("first", [1.0, -1.0])
def test_an_explosion_does_not_reach_back(first: float) -> None:
    losses = [first] * 90 + [1e30] * 3
    smoothed = smoothed_losses(rates()[:93], losses)
    assert smoothed[77] == pytest.approx(first, abs=1e-3)
    assert max(smoothed) <= first + 7


def test_smoothing_of_nothing_is_nothing() -> None:
    assert smoothed_losses([], []) == []
    assert smoothed_losses([0.1], [0.0]) == [0.0]


# -- suggestions ------------------------------------------------------------------------------------------------------


def test_suggestions_on_a_curve_in_closed_form() -> None:
    lrs = rates()
    losses = curve(lrs)
    assert suggested_lr(lrs, losses, "steepest") == pytest.approx(1e-3, rel=0.3)
    assert suggested_lr(lrs, losses, "valley") == pytest.approx(1e-3, rel=0.5)
    lowest = lrs[losses.index(min(losses))]
    assert lowest / 2.5 < 10 * suggested_lr(lrs, losses, "minimum/10") < lowest * 1.1  # smoothing looks ahead


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_noise_does_not_move_a_suggestion(method: Any, seed: int, size: float) -> None:
    lrs = rates()
    quiet = suggested_lr(lrs, curve(lrs), method)
    assert quiet / 3 < suggested_lr(lrs, noisy(curve(lrs), size, seed), method) < 3 * quiet


@pytest.fixture(scope="module")
def real() -> LRFinderResult:
    batches = loader(512, 64, shuffle=True)  # with smaller ones it depends on the draw whether there is a suggestion
    return find_lr(trainer(), build(Net), batches, min_lr=1e-6, max_lr=10.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_noise_does_not_move_a_suggestion_of_a_real_fit(real: LRFinderResult, method: Any, size: float) -> None:
    quiet = real.suggestion(method)
    for seed in range(20):
        again = LRFinderResult(real.lrs, tuple(noisy(real.losses, size, seed)))
        assert quiet / 3 < again.suggestion(method) < 3 * quiet


def test_a_fall_after_a_rise_does_not_count() -> None:
    lrs = rates()
    losses = [loss + 3 * math.exp(-((k - 95) ** 2) / 4) for k, loss in enumerate(curve([min(lr, 0.02) for lr in lrs]))]
    assert suggested_lr(lrs, losses, "steepest") == pytest.approx(1e-3, rel=0.3)
    assert suggested_lr(lrs, losses, "valley") == pytest.approx(1e-3, rel=0.7)


def test_a_loss_below_zero_is_as_good() -> None:
    lrs = rates()
    for method in METHODS:
        lowered = [loss - 5 for loss in curve(lrs)]
        assert suggested_lr(lrs, lowered, method) == pytest.approx(suggested_lr(lrs, curve(lrs), method), rel=0.5)


@pytest.mark.parametrize("losses", [[1.0] * 50, noisy([1.0] * 50, 0.1, 0), [1 + 0.1 * k for k in range(50)]])
def test_what_does_not_fall_suggests_nothing(losses: list[float]) -> None:
    with pytest.raises(ValueError, match="must fall"):
        suggested_lr(rates(50), losses)


def test_a_suggestion_needs_ten_losses() -> None:
    with pytest.raises(ValueError, match="at least 10 losses, got 9"):
        suggested_lr(rates(9), curve(rates(9)))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'valley'"):
        suggested_lr(rates(), curve(rates()), "vally")


# -- the result -------------------------------------------------------------------------------------------------------


def test_the_result_is_plain_data(real: LRFinderResult) -> None:
    data = json.loads(json.dumps(real.to_dict()))
    assert LRFinderResult(tuple(data["lrs"]), tuple(data["losses"])) == real
    assert tuple(data["smoothed"]) == real.smoothed
    assert len(real.smoothed) == len(real.losses)


def test_a_plot_has_its_suggestions_and_takes_axes() -> None:
    from matplotlib.figure import Figure

    mpl.use("agg")
    import matplotlib.pyplot as plt

    result = LRFinderResult(tuple(rates()), tuple(curve(rates())))
    figure, ax = result.plot()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label.split()[0] for label in labels] == ["loss", "smoothed", *METHODS]
    assert ax.get_xscale() == "log"
    plt.close(figure)
    own = Figure().subplots()
    assert result.plot(own)[1] is own
    assert plt.get_fignums() == []
    LRFinderResult((), ()).plot(Figure().subplots())  # also where there is nothing to suggest


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\[plot\]'"):
        LRFinderResult(tuple(rates()), tuple(curve(rates()))).plot()


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_lr": 0.0}, ValueError, "min_lr must be above 0"),
        ({"min_lr": 1.0, "max_lr": 0.1}, ValueError, "below max_lr"),
        ({"max_lr": "1"}, TypeError, "max_lr must be a number"),
        ({"steps": 5}, ValueError, "steps must be at least 10"),
        ({"steps": 5.5}, TypeError, "steps must be a whole number"),
        ({"stop_factor": 1}, ValueError, "stop_factor must be above 1"),
        ({"stop_factor": 0.5}, ValueError, "stop_factor must be in"),
        ({"train_dataloaders": iter([])}, TypeError, "read again"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_lr(trainer(), build(Net), **{"train_dataloaders": loader(), **arguments})


def test_trainer_and_module_are_checked() -> None:
    with pytest.raises(TypeError, match=r"trainer must be a lightning\.pytorch Trainer"):
        find_lr(build(Net), trainer())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module must be a LightningModule"):
        find_lr(trainer(), torch.nn.Linear(1, 1))  # type: ignore[arg-type]
