"""Batches in every structure: how each is made of inputs and targets, and how a module reads it."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import rnn

from tests.fuzz.states import with_columns, with_unit


@dataclass
class Pair:
    x: Any
    y: Any


@dataclass(frozen=True)
class FrozenPair:
    x: Any
    y: Any


class OwnDict(dict[str, Any]):
    """A batch with an attribute besides its items."""

    version = 0


class Opaque:
    """A batch in a class that nobody knows."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Opaque:
        return Opaque(self.x.to(device), self.y.to(device))


class Graph:
    """The inputs of all samples together, in a class that nobody knows."""

    def __init__(self, x: Tensor) -> None:
        self.nodes = x.repeat_interleave(2, 0)


@dataclass
class Nodes:
    """The same as a dataclass of tensors."""

    nodes: Tensor
    edges: Tensor


NamedPair = namedtuple("NamedPair", ["x", "y"])
NamedGraph = namedtuple("NamedGraph", ["graph", "Y"])


def _own_dict(x: Tensor, y: Tensor) -> OwnDict:
    batch = OwnDict(x=x, y=y)
    batch.version = 2
    return batch


def _counted(batch: OwnDict) -> Any:
    assert batch.version == 2, "a batch without its attribute"
    return batch["x"], batch["y"]


def _sized(batch: TensorDict) -> Any:
    assert batch.batch_size == batch["x"].shape[:1], "a TensorDict without its batch size"
    return batch["x"], batch["y"]


def _of_graph(batch: Any) -> Any:
    return batch.graph.nodes[::2], batch.Y


def _plain(x: Tensor, name: str) -> Tensor:
    assert hasattr(x, name), f"a tensor without its attribute {name}"
    return x.as_subclass(Tensor)


Batch = tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]  # how it is made of x and y, and how it is read
BATCHES: dict[str, Batch] = {
    "tuple": (lambda x, y: (x, y), tuple),
    "list": (lambda x, y: [x, y], tuple),
    "dict": (lambda x, y: {"x": x, "y": y, "scale": 2.0, "who": "all", "none": None}, lambda b: (b["x"], b["y"])),
    "dict that is emptied": (lambda x, y: {"labels": y, "image": x}, lambda b: (b.pop("image"), b.pop("labels"))),
    "OrderedDict": (lambda x, y: OrderedDict(input=x, target=y), lambda b: tuple(b.values())),
    "UserDict": (lambda x, y: UserDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "MappingProxyType": (lambda x, y: types.MappingProxyType({"x": x, "y": y}), lambda b: (b["x"], b["y"])),
    "dict with an attribute": (_own_dict, _counted),
    "TensorDict": (lambda x, y: TensorDict({"x": x, "y": y}, batch_size=[len(x)]), _sized),
    "named tuple": (NamedPair, tuple),
    "dataclass": (Pair, lambda b: (b.x, b.y)),
    "frozen dataclass": (FrozenPair, lambda b: (b.x, b.y)),
    "opaque": (Opaque, lambda b: (b.x, b.y)),
    "SimpleNamespace": (lambda x, y: types.SimpleNamespace(x=x, y=y), lambda b: (b.x, b.y)),
    "opaque inputs": (lambda x, y: NamedGraph(Graph(x), y), _of_graph),
    "nodes and edges": (
        lambda x, y: NamedGraph(Nodes(x.repeat_interleave(2, 0), torch.zeros(2, 10, dtype=torch.long)), y),
        _of_graph,
    ),
    "nested": (
        lambda x, y: {"data": {"views": [x, x.flip(1)], "names": ["a"] * len(x)}, "target": {"labels": y}},
        lambda b: (b["data"]["views"][0] + 0.1 * b["data"]["views"][1], b["target"]["labels"]),
    ),
    "mask": (lambda x, y: {"x": x, "mask": x > 0, "y": y}, lambda b: (b["x"] * (0.5 + b["mask"]), b["y"])),
    "ragged": (
        lambda x, y: {"x": [part[: 4 + int(label)].flatten() for part, label in zip(x, y, strict=True)], "y": y},
        lambda b: (torch.stack([F.pad(part.flatten(), (0, 8 - part.numel())) for part in b["x"]]), b["y"]),
    ),
    "one sample each": (
        lambda x, y: [{"x": one, "y": label} for one, label in zip(x, y, strict=True)],
        lambda b: (torch.stack([each["x"] for each in b]), torch.stack([each["y"] for each in b])),
    ),
    "three parts": (lambda x, y: (x, y, y + 1), lambda b: (b[0], b[1])),
    "numbers and arrays": (
        lambda x, y: {"x": x, "y": y, "ids": y.numpy() + 1, "step": torch.tensor(3), "keys": {1: x + 0}},
        lambda b: (b["x"] + 0 * b["keys"][1], b["y"]),
    ),
    "one tensor": (
        lambda x, y: torch.cat([x.flatten(1), y[:, None].to(x.dtype)], 1),
        lambda b: (b[:, :-1], b[:, -1].long()),
    ),
    "nested tensor": (
        lambda x, y: {"x": torch.nested.nested_tensor(list(x)), "y": y},
        lambda b: (torch.stack(b["x"].unbind()), b["y"]),
    ),
    "packed": (
        lambda x, y: (rnn.pack_padded_sequence(x.flatten(1), [8] * len(x), batch_first=True), y),
        lambda b: (rnn.pad_packed_sequence(b[0], batch_first=True)[0], b[1]),
    ),
    "sparse": (lambda x, y: {"x": x.to_sparse(), "y": y}, lambda b: (b["x"].to_dense(), b["y"])),
    "columns": (lambda x, y: {"x": with_columns(x, ["a", "b"]), "y": y}, lambda b: (_plain(b["x"], "columns"), b["y"])),
    "unit": (lambda x, y: (with_unit(x), y), lambda b: (_plain(b[0], "unit"), b[1])),
    "columns beside": (
        lambda x, y: {"x": x, "names": with_columns(x.flatten(1)[:, :2] * 1, ["a", "b"]), "y": y},
        lambda b: (b["x"] * (1 + 0.1 * _plain(b["names"], "columns").shape[1]), b["y"]),
    ),
    "flat nodes": (
        lambda x, y: {"nodes": x.repeat_interleave(2, 0), "counts": torch.full((len(x),), 2), "y": y},
        lambda b: (b["nodes"][b["counts"].cumsum(0) - 1], b["y"]),
    ),
}


NOT_MOVED = ("frozen dataclass", "UserDict", "MappingProxyType", "dict with an attribute")  # whole, by Lightning itself
