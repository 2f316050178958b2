"""freeze: what is frozen neither trains nor counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lightning_tricks as lt
from lightning_tricks.callbacks.freeze import batchnorms_of
from tests.nets import Net, NormNet, build, fit, weights


def test_patterns_are_searched_in_names() -> None:
    module = build(Net)
    assert lt.freeze(module, [r"^layers\.0", r"4\.bias"]) == ["layers.0.weight", "layers.0.bias", "layers.4.bias"]
    assert lt.freeze(module, r"bias$") == ["layers.1.bias"]  # the others were frozen
    assert module.layers[1].training  # its weight trains
    assert lt.freeze(module, "") == ["layers.1.weight", "layers.4.weight"]
    assert not module.layers[1].training


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode at the start of training")  # they are to be
def test_frozen_layers_keep_weights_and_statistics_through_a_fit() -> None:
    module = build(NormNet)
    lt.freeze(module, r"^layers\.[01]\.")
    before = weights(module)
    fit(module)
    for name, value in weights(module).items():
        assert torch.equal(value, before[name]) is not name.startswith("layers.3."), name


def test_batchnorm_without_parameters_goes_with_what_is_before_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert batchnorms_of(model, {"0.weight": 4, "0.bias": 4}) == [(model[1], 4)]
    assert batchnorms_of(model, {"3.weight": 1, "3.bias": 1}) == [(model[3], 1)]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [("^head", r"'\^head' is in none. Parameters are"), (["layers", "("], r"patterns: '\(' is no regex")],
)
def test_mistakes_raise(patterns: Any, message: str) -> None:
    module = build(Net)
    with pytest.raises(ValueError, match=message):
        lt.freeze(module, patterns)
    assert all(each.requires_grad for each in module.parameters())
