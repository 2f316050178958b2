"""Batches of any structure: mixed and filtered as a naive reference does it, or refused with what was seen in them."""

from __future__ import annotations

import copy
import random
import re
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks.core.batches.cutting import select_samples
from lightning_tricks.core.batches.paths import get, mapped
from lightning_tricks.core.batches.pipeline import BatchContext
from tests.fuzz.profiles import cases

Pair = namedtuple("Pair", ["x", "y"])
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


@dataclass(frozen=True)
class Sample:
    """A batch that nobody can write to."""

    x: Any
    y: Any


@st.composite
def tensors(draw: st.DrawFn, size: int) -> Tensor:
    shape = (draw(st.sampled_from([size, size, size, size + 1])), *draw(st.lists(st.integers(1, 3), max_size=3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (10 * torch.rand(shape, generator=generator)).to(draw(st.sampled_from(DTYPES)))


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, Any]:
    """A size, and a batch of so many samples, mostly."""
    size = draw(st.integers(1, 5))
    leaf = st.one_of(tensors(size), st.lists(st.integers(), min_size=size, max_size=size), st.none(), st.just("text"))
    names = st.sampled_from(["x", "y", "labels", "input_ids", "meta", "image"])
    inner = st.recursive(
        leaf, lambda each: st.one_of(st.lists(each, max_size=2), st.dictionaries(names, each, max_size=3)), max_leaves=5
    )
    x, y = draw(st.one_of(tensors(size), inner)), draw(st.one_of(tensors(size), inner))
    kind = draw(st.sampled_from([tuple, list, dict, Pair, Sample]))
    return size, {"x": x, "y": y, "meta": draw(leaf)} if kind is dict else kind((x, y)) if kind in (
        tuple,
        list,
    ) else kind(x, y)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return same(a.__dict__, b.__dict__) if isinstance(a, Sample) else bool(a == b)


def assert_mixed(x: Tensor, mixed: Tensor, drawn: Any, by_sums: bool) -> None:
    assert mixed is not x
    assert (mixed.shape, mixed.dtype) == (x.shape, x.dtype)
    if by_sums:
        expected = torch.stack([drawn.lam * x[i] + (1 - drawn.lam) * x[j] for i, j in enumerate(drawn.index)])
        tolerance = 0.1 if x.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(mixed, expected, rtol=tolerance, atol=tolerance)
    else:
        assert bool(((mixed == x) | (mixed == x[drawn.index])).all())


@cases(60)
@given(made=batches(), kind=st.sampled_from([lt.Mixup, lt.CutMix]), seed=st.integers(0, 99))
def test_a_batch_is_mixed_or_what_is_in_it_is_named(made: tuple[int, Any], kind: type, seed: int) -> None:
    _, batch = made
    before, callback = copy.deepcopy(batch), kind(1.0)
    work = BatchContext(batch, 0, random.Random(seed))
    try:
        callback._change(None, work)
    except MisconfigurationException as error:
        if not re.search(rf"{kind.__name__}.* (has|with) ", str(error)):
            raise
    else:
        for path in callback.inputs_in(batch):
            assert_mixed(get(batch, path), get(work.batch, path), callback.drawn, by_sums=kind is lt.Mixup)
    assert same(batch, before), "the batch itself was changed"


@cases(60)
@given(made=batches(), data=st.data())
def test_some_samples_of_a_batch_are_those_samples_everywhere(made: tuple[int, Any], data: st.DataObject) -> None:
    size, batch = made
    before = copy.deepcopy(batch)
    kept = torch.tensor(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    few, leaves, found, refusal = None, [], [], ""
    try:
        few = select_samples(batch, kept, size, "Test")
    except MisconfigurationException as error:
        refusal = str(error)
    if refusal:
        assert re.search(r"cannot know how samples are stored in batch(\[.+\])?, a ", refusal)
        assert same(batch, before)
        return
    mapped(batch, lambda leaf: leaves.append(leaf) or leaf)
    mapped(few, lambda leaf: found.append(leaf) or leaf)
    whole = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    some = [leaf for leaf in found if isinstance(leaf, Tensor)]
    if len(whole) == len(some):  # no list of tensors was taken for one entry a sample
        for a, b in zip(whole, some, strict=True):
            assert torch.equal(b, torch.stack([a[i] for i in kept]) if len(a) == size else a)
    assert same(batch, before), "the batch itself was changed"
