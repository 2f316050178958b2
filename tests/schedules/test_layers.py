"""Layers are found by their numbers, the rest by its place; models are in test_param_groups.py."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_tricks.schedules.param_groups import known_layers, numbered_layers


def test_what_has_no_number_belongs_to_its_neighbours_or_to_the_head():
    model = nn.ModuleDict({"stem": nn.Linear(1, 1), "blocks": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])})
    model["head"] = nn.Linear(1, 1)
    layers = numbered_layers(model, r"^blocks\.(\d+)")
    order = [layers[f"{name}.weight"] for name in ("stem", "blocks.0", "blocks.1", "head")]
    assert order == sorted(set(order))
    assert all(layers[name.replace("weight", "bias")] == key for name, key in layers.items())


def test_a_model_of_no_known_library_needs_a_pattern():
    with pytest.raises(ValueError, match="pattern"):
        known_layers(nn.Sequential(nn.Linear(1, 1)))
