"""Batches of every shape: what is found, what is replaced in a copy, and what is refused."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks import Mixup
from lightning_tricks.core.batches.cutting import select_samples
from lightning_tricks.core.batches.paths import (
    INPUTS,
    TARGETS,
    check_names,
    described,
    find,
    get,
    locate,
    mapped,
    path_of,
    put,
)
from tests.batches import batches
from tests.callbacks.test_mixup import feed
from tests.nets import PlainNet, build, fit, loader

X, Y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0])
Named = namedtuple("Named", "image label")
Unnamed = namedtuple("Unnamed", "a b")


@dataclasses.dataclass
class Data:
    x: Any
    y: Any
    extra: Any = "e"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    img: Any
    target: Any


class Pair(tuple):
    pass


@dataclasses.dataclass
class Output(transformers.utils.ModelOutput):
    pixel_values: Any = None
    labels: Any = None


BATCHES = {
    "tuple": ((X, Y), (0,), (1,)),
    "list": ([X, Y], (0,), (1,)),
    "tuple subclass": (Pair((X, Y)), (0,), (1,)),
    "namedtuple": (Named(X, Y), ("image",), ("label",)),
    "namedtuple of other names": (Unnamed(X, Y), (0,), (1,)),
    "dict": ({"id": 1, "images": X, "labels": Y, "text": ["a"] * 3}, ("images",), ("labels",)),
    "OrderedDict": (OrderedDict(y=Y, x=X), ("x",), ("y",)),
    "defaultdict": (defaultdict(list, y=Y, x=X), ("x",), ("y",)),
    "dataclass": (Data(X, Y), ("x",), ("y",)),
    "frozen": (Frozen(X, Y), ("x",), ("y",)),
    "frozen with slots": (Slots(X, Y), ("img",), ("target",)),
    "BatchEncoding": (transformers.BatchEncoding({"pixel_values": X, "labels": Y}), ("pixel_values",), ("labels",)),
    "ModelOutput": (Output(X, Y), ("pixel_values",), ("labels",)),
    "dict in pair": (({"x": X, "mask": X}, Y), (0, "x"), (1,)),
    "dicts in pair": (({"x": X}, {"label": Y}), (0, "x"), (1, "label")),
    "pair in dict": ({"inputs": {"image": X}, "target": Y}, ("inputs", "image"), ("target",)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_inputs_and_target_are_found_and_replaced_in_a_copy(name: str) -> None:
    batch, x, y = BATCHES[name]
    assert (find(batch, INPUTS, 0), find(batch, TARGETS, 1)) == ([x], [y])
    assert get(batch, x) is X
    for path in (x, y):
        new = put(batch, path, "new")
        assert type(new) is type(batch)
        assert get(new, path) == "new"
        (other,) = {x, y} - {path}
        assert get(new, other) is get(batch, other)
        assert get(batch, x) is X
        assert get(batch, y) is Y


@pytest.mark.parametrize(
    "batch",
    [(X, Y, X), [X], {"a": X, "b": Y}, {"a": (X, Y), "b": (X, Y)}, Data("x", [1, 2]), (), "ab", None, 3, ("a", "b")],
    ids=str,
)
def test_nothing_is_found_where_it_is_not_clear(batch: Any) -> None:
    assert locate(batch, None, TARGETS, 1) == []
    assert locate(batch, None, INPUTS, 0) == [] or isinstance(get(batch, find(batch, INPUTS, 0)[0]), Tensor)


@pytest.mark.parametrize(
    ("batch", "asked", "paths"),
    [
        ((X, Y), 0, [(0,)]),
        ((X, Y), -1, [(-1,)]),
        ((X, Y), "1", [(1,)]),
        ({"a": {"b": [X, Y]}}, "a.b.1", [("a", "b", 1)]),
        ({"a": X, "b": X}, ["a", "b"], [("a",), ("b",)]),
        ({0: X, "1": Y}, [0, 1], [(0,), (1,)]),
        (SimpleNamespace(graph=SimpleNamespace(nodes=X)), "graph.nodes", [("graph", "nodes")]),
        (Unnamed(X, Y), "b", [("b",)]),
        ({"image.npy": X}, "image.npy", [("image.npy",)]),
        ((X, Y), 2, []),
        ((X, Y), "x", []),
        ({"a": X}, "b", []),
        ({"a": X}, ["a", "b"], []),
        ({"a": "text"}, "a", []),
        ({"a": X}, "a.b.c", []),
    ],
)
def test_what_is_asked_for_is_located_or_nothing_is(batch: Any, asked: Any, paths: list[Any]) -> None:
    assert locate(batch, asked, INPUTS, 0) == paths
    for path in paths:
        assert get(put(batch, path, "new"), path) == "new"


def test_all_containers_on_a_path_are_copies_and_the_others_the_same() -> None:
    batch = {"a": {"b": [X, Y]}, "c": [X]}
    new = put(batch, ("a", "b", 1), X)
    assert new is not batch
    assert new["a"]["b"] is not batch["a"]["b"]
    assert batch["a"]["b"][1] is Y
    assert new["c"] is batch["c"]
    assert put(batch, (), X) is X


class Handle(dict[str, Any]):
    def __copy__(self) -> Any:
        raise TypeError("cannot copy a handle")


def test_a_batch_that_cannot_be_copied_is_refused_by_its_class() -> None:
    message = "the batch, a Handle, cannot be copied .TypeError: cannot copy a handle.*have the collate function return"
    with pytest.raises(MisconfigurationException, match=message):
        put(Handle(x=torch.ones(2)), ("x",), torch.zeros(2))


def test_names_are_checked() -> None:
    for names in (None, 0, "a.b", ["a", 1]):
        check_names("inputs", names)
    for names in (1.5, True, b"x", [None], [True], {"a"}):
        with pytest.raises(TypeError, match="inputs must be a key"):
            check_names("inputs", names)


def test_what_has_one_entry_a_sample_is_narrowed_and_nothing_else() -> None:
    batch = {
        "x": X,
        "meta": {"names": ["a", "b", "c"], "sizes": (1, 2, 3), "n": 3, "scale": torch.tensor(2.0)},
        "array": np.arange(3),
        "weights": torch.zeros(2),
        "text": "abc",
        "size": namedtuple("Size", "c h w")(3, 8, 8),  # three numbers, and no sequence of three samples
        "boxes": [torch.full((n, 4), n) for n in (1, 2, 5)],
    }
    new = select_samples(batch, torch.tensor([0, 2]), 3, "Test")
    assert new["x"].tolist() == X[[0, 2]].tolist()
    assert new["meta"] == {"names": ["a", "c"], "sizes": (1, 3), "n": 3, "scale": torch.tensor(2.0)}
    assert new["array"].tolist() == [0, 2]
    assert new["weights"] is batch["weights"]
    assert (new["text"], new["size"]) == ("abc", (3, 8, 8))
    assert [len(boxes) for boxes in new["boxes"]] == [1, 5]
    assert batch["meta"]["names"] == ["a", "b", "c"]


@pytest.mark.parametrize("name", BATCHES)
def test_every_leaf_is_changed_in_a_batch_of_the_same_type(name: str) -> None:
    batch, x, y = BATCHES[name]
    new = mapped(batch, lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf)
    assert type(new) is type(batch)
    assert torch.equal(get(new, x), X + 1)
    assert torch.equal(get(new, y), Y + 1)
    assert get(batch, x) is X
    assert mapped(batch, lambda leaf: leaf) is batch


def test_a_batch_is_described() -> None:
    assert described((X, {"y": Y, "t": ["a"]})) == "0: float32 (3, 2), 1.y: int64 (3,), 1.t: 1 str"
    assert described(None) == "an object: NoneType"
    assert described({}) == "an object: dict"
    assert described(X) == "a tensor: float32 (3, 2)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"target=None\) finds no such tensor in the batch, which has a: float32 \(8, 8\), b: int64 \(8,\)\. Pass"),
        ({"target": "c"}, r"target='c'\) finds no such"),
        ({"target": "b"}, r"Mixup\(inputs=None\) finds no such"),
        ({"target": "b", "inputs": ["a", "b.c"]}, r"inputs=\['a', 'b.c'\]\) finds no such"),
    ],
    ids=str,
)
def test_what_is_not_found_is_named_with_what_there_is(settings: dict[str, Any], message: str) -> None:
    batches = [{"a": x, "b": y} for x, y in loader()]
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(PlainNet), train=feed(*batches), callbacks=[Mixup(**settings)])


def test_a_bare_tensor_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"finds no such tensor .* has a tensor: float32 \(8, 8\)"):
        fit(build(PlainNet), train=feed(*(x for x, _ in loader())), callbacks=[Mixup()])


# ---- what is easily taken for something else


def test_two_pairs_are_not_one() -> None:
    batch = [[X, Y], [X, Y]]
    assert locate(batch, None, INPUTS, 0) == locate(batch, None, TARGETS, 1) == []


def test_half_of_the_inputs_is_not_the_inputs() -> None:
    assert locate(([X, X], Y), None, INPUTS, 0) == []
    assert locate((X, [Y, Y]), None, TARGETS, 1) == []


def test_a_row_of_a_tensor_is_refused_or_replaced_in_a_copy() -> None:
    batch = X.clone()
    if locate(batch, 0, INPUTS, 0):
        put(batch, (0,), torch.full((2,), 9.0))
    assert torch.equal(batch, X)


@pytest.mark.parametrize("name", ["x²".removeprefix("x"), "--1"])
def test_odd_names_are_keys(name: str) -> None:
    assert path_of(name) == (name,)


@pytest.mark.parametrize("batch", [{"image": X, "features": X, "label": Y}, {"image": X, "label": Y, "target": Y}])
def test_several_candidates_are_refused_and_listed(batch: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=r"finds several such tensors in the batch, which has image"):
        fit(build(PlainNet), train=DataLoader([batch], batch_size=None), callbacks=[Mixup()])


class Molecules(NamedTuple):
    """A batch whose parts have positions and names, as that of chemprop."""

    x: Tensor
    nothing: None
    y: Tensor
    weight: Tensor


@pytest.mark.parametrize(("inputs", "target"), [(0, 2), ("x", "y"), (0, "y")])
def test_a_part_of_a_named_tuple_is_the_same_by_position_and_by_name(inputs: Any, target: Any) -> None:
    class Weighted(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (F.mse_loss(self(batch.x)[:, 0], batch.y, reduction="none") * batch.weight).mean()

    train = batches(lambda x, y: Molecules(x, None, y.float(), torch.ones(len(x))))
    fit(build(Weighted), train=train, callbacks=[lt.Mixup(inputs=inputs, target=target)], limit_val_batches=0)
