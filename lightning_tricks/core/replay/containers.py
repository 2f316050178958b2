"""Exact restoration of containers, random generators, arrays and objects that are written in Python."""

from __future__ import annotations

import array
import dataclasses
import logging
import pickle
import random
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

SIMPLE = (type(None), bool, int, float, complex, str, bytes, type, range)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
_VALUES = (Enum, PurePath, re.Pattern, date, time, timedelta, torch.dtype, torch.device)
_IMMUTABLE = (*SIMPLE, *_CODE, *_VALUES, logging.Logger)  # a loggers' handlers are shared by all of the program
_LIBRARIES = {"torch", "torchmetrics", "lightning_fabric", L.__name__.split(".")[0], __name__.split(".")[0]}

Contents = tuple[str, Sequence[Any], list[Any]]  # the form of a path, keys or names, and the items at them


def _by_class(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of a class without keeping the class alive: a notebook's cell makes a new one at every run."""
    kept: WeakKeyDictionary[type, dict[Any, Any]] = WeakKeyDictionary()

    def cached(kind: type, *others: Any) -> Any:
        found = kept.setdefault(kind, {})
        if others not in found:
            found[others] = function(kind, *others)
        return found[others]

    return cached


# -- the kinds of objects that hold something -------------------------------------------------------------------------


def _set_state(generator: Any, state: Any) -> None:
    generator.set_state(state)


def _write_array(held: Any, entries: Any) -> None:
    held[:] = entries


def _write_ordered(mapping: OrderedDict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    OrderedDict.clear(mapping)
    for key, item in items:  # dict.update would leave out the order, which is kept apart from the dictionary
        OrderedDict.__setitem__(mapping, key, item)


def write_dict(mapping: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    """Give a dictionary these items and no others, by the methods of ``dict``: ``Counter.update`` would add counts."""
    dict.clear(mapping)
    dict.update(mapping, items)


def _write_deque(sequence: deque[Any], items: list[Any]) -> None:
    deque.clear(sequence)
    deque.extend(sequence, items)


def _write_set(members: set[Any], items: list[Any]) -> None:
    set.clear(members)
    set.update(members, items)


@dataclass(frozen=True)
class _Kind:
    """How to keep the objects of a class: random generators, arrays and containers.

    Args:
        base: The class. Of containers its own methods are called, since those of a subclass may do something else.
        role: What its objects are.
        read: Copies what an object holds: the state of a generator, the entries of an array, the items of a container.
        write: Gives an object what was read from it.
        as_bytes: Turns the state that was read from a generator, or an array itself, into bytes.
        form: The form of a path to an item of a container.
    """

    base: type
    role: Literal["generator", "array", "container"]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    as_bytes: Callable[[Any], bytes] = pickle.dumps
    form: str = "[{}]"


def _nothing(immutable: Any, items: list[Any]) -> None:
    """Write nothing: only the attributes of an immutable container can have changed."""


_KINDS = (  # a class comes before its base class
    _Kind(torch.Generator, "generator", methodcaller("get_state"), _set_state, lambda s: s.numpy().tobytes()),
    _Kind(random.Random, "generator", methodcaller("getstate"), lambda held, state: held.setstate(state)),
    _Kind(bytearray, "array", itemgetter(slice(None)), _write_array, bytes),
    _Kind(array.array, "array", itemgetter(slice(None)), _write_array, bytes),
    _Kind(OrderedDict, "container", OrderedDict.items, _write_ordered, form="[{!r}]"),
    _Kind(defaultdict, "container", dict.items, write_dict, form="[{!r}]"),
    _Kind(dict, "container", dict.items, write_dict, form="[{!r}]"),
    _Kind(list, "container", list.__iter__, lambda held, items: list.__setitem__(held, slice(None), items)),
    _Kind(deque, "container", deque.__iter__, _write_deque),
    _Kind(set, "container", set.__iter__, _write_set),
    _Kind(tuple, "container", tuple.__iter__, _nothing),
    _Kind(frozenset, "container", frozenset.__iter__, _nothing),
)


def _numpy_kinds() -> tuple[_Kind, ...]:
    """The kinds of NumPy; none if the program has not imported it, and so has no objects of it."""
    if (numpy := sys.modules.get("numpy")) is None:
        return ()
    return (
        _Kind(numpy.ndarray, "array", methodcaller("copy"), numpy.copyto, methodcaller("tobytes")),
        _Kind(
            numpy.random.Generator,
            "generator",
            attrgetter("bit_generator.state"),
            lambda held, state: setattr(held.bit_generator, "state", state),
        ),
        _Kind(numpy.random.RandomState, "generator", methodcaller("get_state"), _set_state),
    )


def _kind_of(value: Any) -> _Kind | None:
    """The row of an object's class.

    ``isinstance`` would believe a proxy that claims to be a dictionary, and ``dict.items`` raises for one.
    """
    row: _Kind | None = _row_of(type(value))
    return row


@_by_class
def _row_of(kind: Any) -> _Kind | None:
    """The row of a class; None for one whose objects are restored by their attributes, or not at all."""
    if issubclass(kind, random.SystemRandom):  # the operating system draws its numbers
        return None
    return next((row for row in (*_KINDS, *_numpy_kinds()) if issubclass(kind, row.base)), None)


def generator_restorer(value: Any) -> Callable[[], object] | None:
    """A function that restores the state of a random generator; None for other objects."""
    kind = _kind_of(value)
    return partial(kind.write, value, kind.read(value)) if kind is not None and kind.role == "generator" else None


def bytes_in(value: Any) -> bytes | None:
    """The numbers of an array, or the state of a random generator, in bytes; None for other objects."""
    kind = _kind_of(value)
    if kind is None or kind.role == "container":
        return None
    return kind.as_bytes(value if kind.role == "array" else kind.read(value))


# -- restoring --------------------------------------------------------------------------------------------------------


def restorer(value: Any, path: str, *, strict: bool = True) -> Callable[[], object] | None:
    """A function that restores a value's present contents, order and attributes; None for what it cannot restore.

    Args:
        value: A container, a random generator, an array, an object that is written in Python, or anything else.
        path: The path of the value, for the error message.
        strict: Whether to raise for a container that cannot be restored exactly; False ignores it.

    Raises:
        MisconfigurationException: If its class keeps state that Python cannot see.

    Example:
        >>> links = OrderedDict(a=1, b=2)
        >>> restore = restorer(links, "links")
        >>> links.move_to_end("a"), links.pop("b")
        (None, 2)
        >>> restore()
        >>> list(links.items())
        [('a', 1), ('b', 2)]
    """
    kind = _kind_of(value)
    if kind is not None and kind.role != "container":
        return partial(kind.write, value, kind.read(value)) if _is_writeable(value) else None
    abstract = isinstance(value, MutableMapping | MutableSequence | MutableSet)
    record = isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    if kind is None and not abstract and not record:
        return partial(_restore, value, None, [], list(_attributes(value))) if _is_self_contained(value) else None
    own: Any = type(value)
    if _hides_state(own, object if kind is None else kind.base):
        if not strict:
            return None
        raise MisconfigurationException(
            f"{path} is a {type(value).__module__}.{type(value).__name__}, a container that is not written in Python"
            " and cannot be restored exactly for a second run of the step: use a list or a dictionary, or keep it"
            " outside of the module."
        )
    return partial(_restore, value, kind, [] if kind is None else list(kind.read(value)), list(_attributes(value)))


def run_all(functions: Iterable[Callable[[], object]]) -> None:
    """Call functions in their order, also those after one that raises; the first error is raised at the end.

    Example:
        >>> run_all([lambda: print("one"), lambda: 1 / 0, lambda: print("three")])
        Traceback (most recent call last):
        ...
        ZeroDivisionError: division by zero
    """
    errors: list[BaseException] = []
    for function in functions:
        try:
            function()
        except BaseException as error:  # also Ctrl-C
            errors.append(error)
    if errors:
        raise errors[0]


def _is_writeable(held: Any) -> bool:
    """Whether a generator or an array can be written to; an array of NumPy may be a view that cannot."""
    return bool(getattr(getattr(held, "flags", None), "writeable", True))


def _restore(value: Any, kind: _Kind | None, contents: list[Any], attributes: list[tuple[str, Any]]) -> None:
    if kind is not None:
        kind.write(value, contents)
    kept = dict(attributes)
    if hasattr(value, "__dict__"):
        for name in [name for name in vars(value) if name not in kept]:
            del vars(value)[name]
    for name, attribute in attributes:
        if name in getattr(value, "__dict__", ()) or not hasattr(type(value), name):
            vars(value)[name] = attribute
        else:
            object.__setattr__(value, name, attribute)  # a slot, also of a frozen dataclass


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object in its ``__dict__`` and in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name
            if private not in ("__dict__", "__weakref__") and hasattr(value, private):
                yield private, getattr(value, private)
    if isinstance(value, defaultdict):
        yield "default_factory", value.default_factory


# -- what is inside ---------------------------------------------------------------------------------------------------


def contents_of(value: Any) -> Iterator[Contents]:
    """The items and the attributes of a container or an object."""
    kind = _kind_of(value)
    if kind is not None and kind.role == "array":
        if hasattr(value, "dtype") and value.dtype == object:  # an array of NumPy whose entries are references
            yield ".flat[{}]", range(value.size), list(value.flat)
        return
    if kind is not None and kind.role == "container":
        items = list(kind.read(value))
        if issubclass(kind.base, dict):
            yield kind.form, [key for key, _ in items], [item for _, item in items]
        else:
            yield kind.form, range(len(items)), items
    attributes = dict(_attributes(value))
    yield ".{}", list(attributes), list(attributes.values())


def is_plain(value: Any) -> bool:
    """Whether an object is of a class that is written in Python, by neither torch nor Lightning, and can change."""
    kind: Any = type(value)
    return not (isinstance(value, _IMMUTABLE) or any(map(is_of_library, kind.__mro__)) or _hides_state(kind, object))


def is_of_library(code: Any) -> bool:
    """Whether a class or a function is one of torch, Lightning or this package."""
    return (code.__module__ or "").partition(".")[0] in _LIBRARIES


def _is_self_contained(value: Any) -> bool:
    """Whether an object and what it holds can be restored: no file, lock, or other object that is written in C."""
    return is_plain(value) and all(_is_known(item) for _, item in _attributes(value))


def _is_known(value: Any) -> bool:
    kind: Any = type(value)
    known = (*_IMMUTABLE, *(row.base for row in _KINDS), Tensor, nn.Module)
    if isinstance(value, known) or any(map(is_of_library, kind.__mro__)):
        return True
    return kind.__module__.partition(".")[0] == "numpy" or not _hides_state(kind, object)


@_by_class
def _hides_state(kind: Any, base: Any) -> bool:
    """Whether objects of a class keep state in memory besides the base class, attributes and slots."""
    spaces = [vars(base_class) for base_class in kind.__mro__[: kind.__mro__.index(base)]]
    slots = [space.get("__slots__", ()) for space in spaces]
    count = sum(1 if isinstance(names, str) else len(names) for names in slots)
    own = (count + 2) * tuple.__itemsize__  # a pointer for every slot, __dict__ and __weakref__
    in_python = base is not object or any("__dict__" in space or "__slots__" in space for space in spaces)
    return not in_python or bool(kind.__basicsize__ > base.__basicsize__ + own)
