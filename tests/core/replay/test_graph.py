"""The graph of a loss tells which operations are in it."""

from __future__ import annotations

import torch

from lightning_tricks.core.replay.graph import find_graph_node


def test_a_node_of_the_graph_is_found_by_name() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = (x.exp() * x).sum()
    assert find_graph_node(loss, "ExpBackward0".__eq__) == "ExpBackward0"
    assert find_graph_node(loss, "LogBackward0".__eq__) is None
