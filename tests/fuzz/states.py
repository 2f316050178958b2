"""What a module of a user may remember: values of every class, the places they are kept in, and how they change."""

from __future__ import annotations

import array
import collections
import inspect
import io
import itertools
import operator
import random
import types
import zlib
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch
from multidict import MultiDict
from tensordict import TensorDict
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, SumMetric

from tests.fuzz.hooks import OF_THE_MODULE

# -- what can be told of a value --------------------------------------------------------------------------------------


def told(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """All of a value in plain Python: class, contents in their order, limits, attributes, what is one object twice."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | type):
        return value
    if id(value) in seen:
        return "the same as", seen[id(value)][0]
    seen[id(value)] = (len(seen), value)  # which also keeps it, and with it its id, while others are told
    kind = type(value).__name__
    if isinstance(value, Tensor):
        own = told(vars(value), seen) if isinstance(value, Columns | Logged) else ()
        value = value.as_subclass(Tensor) if own else value
        return kind, str(value.dtype), tuple(value.shape), value.requires_grad, number(value), own
    if isinstance(value, np.ndarray | array.array):
        return kind, str(getattr(value, "dtype", "")), repr(value.tolist())
    if isinstance(value, Metric):
        return kind, value._update_count, told({name: getattr(value, name) for name in value._defaults}, seen)
    if isinstance(value, TensorDict):
        return kind, tuple(value.batch_size), told(value.to_dict(), seen)
    if (state := _hidden_state(value)) is not None:
        return kind, state
    inner: list[Any] = [kind]
    if isinstance(value, Mapping):
        inner += [(told(key, seen), told(item, seen)) for key, item in value.items()]
        inner += [told(value.default_factory)] if isinstance(value, defaultdict) else []
    elif isinstance(value, set | frozenset):
        inner += sorted(map(repr, value))
    elif isinstance(value, list | tuple | deque | UserList | bytearray):
        inner += [told(item, seen) for item in value]
        inner += [value.maxlen] if isinstance(value, deque) else []
    inner += [(name, told(attribute, seen)) for name, attribute in attributes_of(value)]
    return tuple(inner)


def number(tensor: Tensor) -> float:
    """A number that depends on every entry of a tensor, and on their order."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return sum(number(part) * place for place, part in enumerate(tensor.unbind(), 1))
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()
    return (flat * torch.arange(1.0, flat.numel() + 1)).sum().item()


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object keeps in its dictionary or in slots; of a module only what a user gave it."""
    own = _OF_A_MODULE if isinstance(value, nn.Module) else ()
    yield from ((name, item) for name, item in getattr(value, "__dict__", {}).items() if name not in own)
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _hidden_state(value: Any) -> Any:
    """The state of an object whose attributes do not tell it."""
    if isinstance(value, torch.Generator):
        return zlib.crc32(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return zlib.crc32(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return zlib.crc32(repr(value.bit_generator.state).encode())
    if isinstance(value, types.FunctionType):
        return repr([cell.cell_contents for cell in value.__closure__ or ()])
    if isinstance(value, types.GeneratorType):
        return repr(inspect.getgeneratorlocals(value))
    if hasattr(value, "__length_hint__"):
        return operator.length_hint(value)
    if hasattr(value, "tell"):
        return value.tell()
    return None


_OF_A_MODULE = {*vars(L.LightningModule()), "_sam"} - {"training", "_buffers", "_parameters", "_modules"}


# -- classes of users -------------------------------------------------------------------------------------------------


class TaggedList(list[Any]):
    """A list with an attribute."""

    tag = 0


class SlottedList(list[Any]):
    """A list with a slot."""

    __slots__ = ("tag",)

    def __init__(self) -> None:
        self.tag = 0


class ReversedList(list[Any]):
    """Gives its items in reversed order, and appends in front."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__())[::-1])

    def append(self, item: Any) -> None:
        self.insert(0, item)


class LimitedDict(OrderedDict[Any, Any]):
    """Drops its oldest entries."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > 2:
            self.popitem(last=False)


class AttributeDict(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self) -> None:
        super().__init__(n=0)
        self.__dict__ = self


class CountingDict(dict[Any, Any]):
    """Counts how often an item is set."""

    count = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.count += 1
        super().__setitem__(key, value)


class TaggedSet(set[Any]):
    """A set with an attribute."""

    tag = 0

    def append(self, item: Any) -> None:
        self.add(item % 3)


@dataclass
class Record:
    """A dataclass, which has items and attributes."""

    steps: int = 0
    values: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class FrozenRecord:
    """One whose list still grows."""

    values: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class SlottedRecord:
    """One without a dictionary."""

    steps: int = 0


Point = namedtuple("Point", ["values", "others"])


class Columns(Tensor):
    """A tensor with names of columns, which all that is made of it has, by methods of its own."""

    columns: list[str]

    def clone(self, **settings: Any) -> Tensor:
        return with_columns(super().clone(**settings), self.columns)

    def detach(self) -> Tensor:
        return with_columns(super().detach(), self.columns)


def with_columns(values: Tensor, columns: list[str]) -> Columns:
    made = values.as_subclass(Columns)
    made.columns = list(columns)
    return made


class Logged(Tensor):
    """A tensor that hands its attributes on, whatever is computed with it."""

    unit: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        units = [each.unit for each in args if isinstance(each, Logged) and hasattr(each, "unit")]
        if isinstance(made, Logged) and units:
            made.unit = units[0]
        return made


def with_unit(values: Tensor) -> Logged:
    made = values.as_subclass(Logged)
    made.unit = "m"
    return made


class Custom:
    """An object of a class that nobody knows."""

    def __init__(self, held: Any = 0) -> None:
        self.held = held


class SlottedCustom:
    """The same with a slot."""

    __slots__ = ("held",)

    def __init__(self, held: Any = 0) -> None:
        self.held = held


class Holder(nn.Module):
    """A module that is kept in a list, so that nobody finds it among the submodules."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


# -- kinds of values, each with the change that is made in a step -----------------------------------------------------

Change = Callable[[Any, int], Any]  # of a value, with the number of the step; what it returns, if not None, replaces it


def _in_order(value: OrderedDict[str, float], step: int) -> None:
    value.move_to_end(next(iter(value)))
    value["a"] += 0.5


def _tagged(value: Any, step: int) -> None:
    value.append(step)
    value.tag += 1


def _recorded(value: Record, step: int) -> None:
    value.steps += 1
    value.values.append(step)


def _added(name: str) -> Change:
    return lambda value, step: setattr(value, name, getattr(value, name) + 1)


def _cut(value: list[int], step: int) -> None:
    value.pop()


def _written(value: Any, step: int) -> None:
    value[step % len(value)] += 1


def _first_replaced(value: list[Any], step: int) -> None:
    value[0] = value[0] + 1


def _in_place(value: Tensor, step: int) -> None:
    value.add_(1)


def _data_written(value: list[Tensor], step: int) -> None:
    value[0].data.mul_(1.5)


def _other_data(value: Tensor, step: int) -> None:
    value.data = value.data * 2


def _column_added(value: Columns, step: int) -> None:
    value.data.add_(1)
    value.columns.append(str(step))


def _drawn(value: Any, step: int) -> None:
    torch.rand(1, generator=value) if isinstance(value, torch.Generator) else value.random()


def _advanced(value: Iterator[Any], step: int) -> None:
    next(value)


def _counter() -> Callable[[], None]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    return add


def _circle() -> list[Any]:
    own: list[Any] = [0]
    own.append(own)
    return own


def _normalized(value: list[nn.Module], step: int) -> None:
    value[0](torch.eye(2) * step)


KINDS: dict[str, tuple[Callable[[], Any], Change]] = {
    "number": (int, lambda value, step: value + 1),
    "None at first": (lambda: None, lambda value, step: step + (value or 0)),
    "list": (list, lambda value, step: value.append(step)),
    "new list": (list, lambda value, step: [*value, step]),
    "list that empties": (lambda: list(range(99)), _cut),
    "dict": (dict, lambda value, step: value.update({step % 3: step})),
    "set": (set, lambda value, step: value.add(step % 3)),
    "tuple": (tuple, lambda value, step: (*value, step)),
    "deque": (lambda: deque(maxlen=2), lambda value, step: value.append(step)),
    "OrderedDict": (lambda: OrderedDict(a=1.0, b=2.0), _in_order),
    "defaultdict": (lambda: defaultdict(list), lambda value, step: value[step % 2].append(step)),
    "Counter": (Counter, lambda value, step: value.update([step % 2])),
    "UserDict": (lambda: UserDict(n=0), lambda value, step: value.update(n=step)),
    "UserList": (UserList, lambda value, step: value.append(step)),
    "MultiDict": (MultiDict, lambda value, step: value.add("step", str(step))),
    "ChainMap": (lambda: collections.ChainMap({"a": 0}, {"b": 0}), lambda value, step: value.update(a=step)),
    "list with an attribute": (TaggedList, _tagged),
    "list with a slot": (SlottedList, _tagged),
    "list in reversed order": (ReversedList, lambda value, step: value.append(step)),
    "set with an attribute": (TaggedSet, _tagged),
    "dict that is limited": (lambda: LimitedDict(a=1, b=2), lambda value, step: value.update({step: step})),
    "dict that counts": (CountingDict, lambda value, step: value.__setitem__("a", step)),
    "dict of attributes": (AttributeDict, _added("n")),
    "named tuple": (lambda: Point([0.0], {1}), lambda value, step: value.values.append(step)),
    "dataclass": (Record, _recorded),
    "frozen dataclass": (FrozenRecord, lambda value, step: value.values.append(step)),
    "dataclass with slots": (SlottedRecord, _added("steps")),
    "nested": (
        lambda: {"deep": [OrderedDict(x=(deque([1]),))]},
        lambda value, step: value["deep"][0]["x"][0].append(step),
    ),
    "list twice": (lambda: [[0]] * 2, lambda value, step: value[1].append(step)),
    "list that holds itself": (_circle, lambda value, step: value.append(step)),
    "bytearray": (lambda: bytearray(4), _written),
    "bytearray that grows": (bytearray, lambda value, step: value.append(step)),
    "array": (lambda: array.array("d", [0.0, 0.0]), _written),
    "NumPy array": (lambda: np.zeros(3), _written),
    "new NumPy array": (lambda: np.zeros(3), lambda value, step: value + step),
    "NumPy array of lists": (lambda: np.array([[0], [1, 2]], dtype=object), lambda value, step: value[0].append(step)),
    "tensor": (lambda: torch.zeros(3), _in_place),
    "new tensor": (lambda: torch.zeros(3), lambda value, step: value + 1),
    "tensor with other data": (lambda: torch.ones(2), _other_data),
    "part of a tensor": (lambda: torch.zeros(4, 2)[1:3, 0], _in_place),
    "expanded tensor": (lambda: torch.zeros(1).expand(3), lambda value, step: value + 1),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda value, step: value * 2),
    "tensor with columns": (lambda: with_columns(torch.zeros(2), ["a", "b"]), _column_added),
    "new tensor with columns": (
        lambda: with_columns(torch.zeros(2), ["a", "b"]),
        lambda value, step: with_columns(value.as_subclass(Tensor) + 1, [*value.columns, str(step)]),
    ),
    "tensor with a unit": (lambda: with_unit(torch.zeros(2)), lambda value, step: value * 2 + 1),
    "written tensor with a unit": (lambda: with_unit(torch.ones(2)), _in_place),
    "parameter that nobody trains": (lambda: [nn.Parameter(torch.ones(2), requires_grad=False)], _data_written),
    "tensor in a list": (lambda: [torch.zeros(2)], _first_replaced),
    "written tensor in a list": (lambda: [torch.zeros(2)], lambda value, step: _in_place(value[0], step)),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), _drawn),
    "random.Random": (lambda: random.Random(1), _drawn),
    "NumPy generator": (lambda: np.random.default_rng(1), _drawn),
    "metric": (SumMetric, lambda value, step: value.update(step)),
    "metrics": (lambda: MetricCollection({"sum": SumMetric()}), lambda value, step: value.update(step)),
    "submodule": (nn.Identity, lambda value, step: setattr(value, f"new{step % 3}", step)),
    "BatchNorm in a list": (lambda: [nn.BatchNorm1d(2)], _normalized),
    "SimpleNamespace": (lambda: types.SimpleNamespace(held=0), _added("held")),
    "object": (Custom, _added("held")),
    "object with a slot": (SlottedCustom, _added("held")),
    "list in an object": (lambda: [Custom([])], lambda value, step: value[0].held.append(step)),
    "iterator": (lambda: iter(range(999)), _advanced),
    "generator": (lambda: (2 * each for each in itertools.count()), _advanced),
    "closure": (_counter, lambda value, step: value()),
    "file in memory": (io.BytesIO, lambda value, step: value.write(b"line\n") * 0 or None),
}
UNCOPIED = {"generator", *(kind for kind in KINDS if "tensor with columns" in kind or "tensor with a unit" in kind)}

Keys = tuple[Any, ...]
PLACES: dict[str, tuple[Callable[[Any], Any], Keys]] = {  # what holds a value, and the way to the value in it
    "attribute": (lambda value: value, ()),
    "layer": (lambda value: value, ()),
    "list": (lambda value: [0, value], (1,)),
    "dict": (lambda value: {"of": value}, ("of",)),
    "OrderedDict": (lambda value: OrderedDict(of=value, other=0), ("of",)),
    "dataclass": (Record, ("steps",)),
    "module in a list": (lambda value: [Holder(value)], (0, "held")),
    "object": (Custom, ("held",)),
}
MOMENTS = (
    "step",
    "forward",
    "forward hook",
    "log",
    "backward hook",
    "gradient hook",
    "accumulation hook",
    *OF_THE_MODULE,
)


@dataclass(frozen=True)
class State:
    """An attribute of a module that changes while it trains.

    Args:
        kind: What it is, of ``KINDS``.
        place: Where it is kept, of ``PLACES``.
        moment: When it changes, of ``MOMENTS``.
    """

    kind: str
    place: str = "attribute"
    moment: str = "step"

    def make(self) -> Any:
        """What the attribute is at first."""
        return PLACES[self.place][0](KINDS[self.kind][0]())

    def changed(self, attribute: Any, step: int) -> Any:
        """Change the value in its place; gives what the attribute is from now on."""
        if not (keys := PLACES[self.place][1]):
            new = KINDS[self.kind][1](attribute, step)
            return attribute if new is None else new
        *way, last = keys
        owner = attribute
        for key in way:
            owner = owner[key]
        by_name = isinstance(last, str) and not isinstance(owner, Mapping)
        new = KINDS[self.kind][1](getattr(owner, last) if by_name else owner[last], step)
        if new is not None:
            setattr(owner, last, new) if by_name else owner.__setitem__(last, new)
        return attribute
