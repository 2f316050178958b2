"""freeze: what is frozen neither trains nor counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_tricks as lt
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


@pytest.mark.parametrize(
    ("patterns", "message"),
    [("^head", r"'\^head' is neither. Names are"), (["layers", "("], r"parameters: '\(' is not a regular expression")],
)
def test_mistakes_raise(patterns: Any, message: str) -> None:
    module = build(Net)
    with pytest.raises(ValueError, match=message):
        lt.freeze(module, patterns)
    assert all(each.requires_grad for each in module.parameters())
