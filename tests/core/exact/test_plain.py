"""Values of any kind as plain ones: they come back as they were, whatever the checkpoint makes of tuples."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy
import pytest
import torch

from lightning_tricks.core.exact.plain import packed, plain, unpacked, unplain

VALUES: list[Any] = [
    (1, (2.5, None), [("a",), "b"], {"c": (3,)}),
    {(1, 2): {(3, 4)}},
    random.Random(0).getstate(),
    numpy.random.RandomState(0).get_state(),
    numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
    [torch.arange(3), ()],
]


def listed(value: Any) -> Any:
    """With lists in place of tuples, as a checkpoint of XLA has them."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return [*map(listed, value)] if isinstance(value, list | tuple) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, numpy.ndarray | torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_through_a_checkpoint_without_tuples(value: Any) -> None:
    assert same(unplain(plain(value)), value)
    assert same(unplain(listed(plain(value))), value)


def test_a_generators_state_comes_back_from_a_worker() -> None:
    state = {"python": random.Random(0).getstate(), "numpy": numpy.random.RandomState(0).get_state()}
    assert packed(plain(state)) == packed(plain(state))
    assert same(unplain(unpacked(packed(plain(state)))), state)


def test_deques_and_frozen_sets_come_back_as_lists_and_sets() -> None:
    assert unplain(plain([deque([(1,)]), frozenset({2})])) == [[(1,)], {2}]
