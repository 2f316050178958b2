"""Metrics of two sets of weights, paired under Lightning's names."""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import pytest
import torch

from lightning_tricks.core.averaging.validation import RawMetrics


def recorded(**metrics: float) -> RawMetrics:
    history = RawMetrics()
    for step in (5, 10):
        history.record(step, {name: torch.tensor(value * step) for name, value in metrics.items()})
    return history


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("loss", "loss_raw"),
        ("loss_epoch", "loss_raw_epoch"),
        ("loss/dataloader_idx_1", "loss_raw/dataloader_idx_1"),
        ("loss_epoch/dataloader_idx_0", "loss_raw_epoch/dataloader_idx_0"),
        ("val/loss", "val/loss_raw"),
        ("loss_step", "loss_step_raw"),
    ],
)
def test_pairs_are_found_under_the_names_that_lightning_makes(name: str, raw: str) -> None:
    history = recorded(**{name: 1.0, raw: 2.0, "train": 3.0})
    assert history.state_dict() == {name: [(5, 5.0, 10.0), (10, 10.0, 20.0)]}


def test_it_goes_through_a_checkpoint() -> None:
    history, other = recorded(loss=1.0, loss_raw=2.0), RawMetrics()
    other.load_state_dict(history.state_dict())
    assert other.state_dict() == history.state_dict()
    lists = {name: [list(row) for row in rows] for name, rows in history.state_dict().items()}  # as XLA saves them
    other.load_state_dict(lists)
    assert other.state_dict() == history.state_dict()


def test_it_draws_into_axes_or_a_figure_of_its_own() -> None:
    history = recorded(loss=1.0, loss_raw=2.0, other=1.0, other_raw=1.0)
    figure, axes = plt.subplots(1, 2)
    assert history.plot("other", axes[1]) == (figure, axes[1])
    own, ax = history.plot(None, None)
    assert own is not figure
    assert [line.get_label() for line in ax.get_lines()] == ["averaged weights", "raw weights"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("optimizer step", "loss")
    plt.close("all")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\[plot\]"):
        recorded(loss=1.0, loss_raw=2.0).plot(None, None)


def test_a_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"no history of 'x'.*recorded: 'loss'"):
        recorded(loss=1.0, loss_raw=2.0).plot("x", None)
    with pytest.raises(ValueError, match="recorded: nothing"):
        RawMetrics().plot(None, None)
