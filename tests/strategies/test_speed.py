"""Faster settings: set, and taken by a Trainer that trains the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch

import lightning_tricks as lt
from tests.nets import assert_equal, build, loader, quiet, weights


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
@pytest.mark.parametrize("benchmark", [True, False])
def test_torch_and_trainer_are_set(matmul: Any, benchmark: bool) -> None:
    arguments = lt.speed_preset(matmul, cudnn_benchmark=benchmark)
    run = L.Trainer(**{**quiet, **arguments})
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cudnn.benchmark == benchmark
    assert run.progress_bar_callback is None
    assert run.log_every_n_steps == 500


def test_it_trains_the_same() -> None:
    ended, metrics = [], []
    for arguments in ({}, lt.speed_preset("highest")):
        module = build()
        run = L.Trainer(**{**quiet, **arguments})
        L.seed_everything(7, verbose=False)
        run.fit(module, loader(), loader(24))
        ended.append(weights(module))
        metrics.append(run.callback_metrics)
    assert_equal(*ended)
    assert_equal(*metrics)


@pytest.mark.parametrize(
    ("arguments", "error"), [({"matmul": "low"}, "must be one of"), ({"cudnn_benchmark": 1}, "True or False")]
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        lt.speed_preset(**arguments)
