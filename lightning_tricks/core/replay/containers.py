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
from datetime import date, time, timedelta
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

SIMPLE = (type(None), bool, int, float, complex, str, bytes, type, range)
_BUILTIN = (OrderedDict, defaultdict, dict, list, deque, set, tuple, frozenset)  # OrderedDict before dict
_ARRAYS = (bytearray, array.array)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
_VALUES = (Enum, PurePath, re.Pattern, date, time, timedelta, torch.dtype, torch.device)
_IMMUTABLE = (*SIMPLE, *_CODE, *_VALUES, logging.Logger)  # a loggers' handlers are shared by all of the program
_LIBRARIES = {"torch", "torchmetrics", "lightning_fabric", pl.__name__.split(".")[0], __name__.split(".")[0]}

Contents = tuple[str, Sequence[Any], list[Any]]  # the form of a path, keys or names, and the items at them


def generator_restorer(value: Any) -> Callable[[], Any] | None:
    """A function that restores the state of a random generator; None for other objects."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None


def bytes_in(value: Any) -> bytes | None:
    """The numbers of an array, or the state of a random generator, in bytes; None for other objects."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return pickle.dumps(value.getstate())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return pickle.dumps(value.get_state())
    is_array = isinstance(value, array.array) or (numpy is not None and isinstance(value, numpy.ndarray))
    return value.tobytes() if is_array else bytes(value) if isinstance(value, bytearray) else None


def restorer(value: Any, path: str, *, strict: bool = True) -> Callable[[], None] | None:
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
    if (generator := generator_restorer(value)) is not None:
        return generator
    if isinstance(value, _ARRAYS):
        return partial(value.__setitem__, slice(None), value[:])
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return partial(numpy.copyto, value, value.copy()) if value.flags.writeable else None
    base = next((kind for kind in _BUILTIN if isinstance(value, kind)), None)
    abstract = isinstance(value, MutableMapping | MutableSequence | MutableSet)
    record = isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    if base is None and not abstract and not record:
        return partial(_restore, value, None, [], list(_attributes(value))) if _is_self_contained(value) else None
    kind: Any = type(value)
    if _hides_state(kind, base or object):
        if not strict:
            return None
        raise MisconfigurationException(
            f"{path} is a {type(value).__module__}.{type(value).__name__}, a container that is not written in Python"
            " and cannot be restored exactly for a second run of the step: use a list or a dictionary, or keep it"
            " outside of the module."
        )
    attributes = list(_attributes(value))
    return partial(_restore, value, base, _contents(value, base), attributes)


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


def _restore(value: Any, base: type | None, contents: list[Any], attributes: list[tuple[str, Any]]) -> None:
    refill(value, base, contents)
    kept = dict(attributes)
    if hasattr(value, "__dict__"):
        for name in [name for name in vars(value) if name not in kept]:
            del vars(value)[name]
    for name, attribute in attributes:
        if name in getattr(value, "__dict__", ()) or not hasattr(type(value), name):
            vars(value)[name] = attribute
        else:
            object.__setattr__(value, name, attribute)  # a slot, also of a frozen dataclass


def refill(container: Any, base: type | None, contents: list[Any]) -> None:
    """Restore the contents of a container by the methods of its built-in class, also for a subclass.

    Args:
        container: The container.
        base: The built-in class.
        contents: The items, as ``_contents`` returned them.
    """
    if base is OrderedDict:  # it keeps its order apart from the dictionary
        OrderedDict.clear(container)
        for key, item in contents:
            OrderedDict.__setitem__(container, key, item)
    elif base in (dict, defaultdict):
        dict.clear(container)
        dict.update(container, contents)  # Counter.update would add counts
    elif base is list:
        list.__setitem__(container, slice(None), contents)
    elif base is deque:
        deque.clear(container)
        deque.extend(container, contents)
    elif base is set:
        set.clear(container)
        set.update(container, contents)


def _contents(value: Any, base: type | None) -> list[Any]:
    if base is None:
        return []
    kind: Any = OrderedDict if base is OrderedDict else dict if issubclass(base, dict) else base
    return list(kind.items(value) if issubclass(kind, dict) else kind.__iter__(value))


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


def contents_of(value: Any) -> Iterator[Contents]:
    """The items and the attributes of a container or an object."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype == object:
            yield ".flat[{}]", range(value.size), list(value.flat)
        return
    if isinstance(value, _ARRAYS):
        return
    base = next((kind for kind in _BUILTIN if isinstance(value, kind)), None)
    if base is not None:
        if issubclass(base, dict):
            kind: Any = OrderedDict if base is OrderedDict else dict
            yield "[{!r}]", list(kind.keys(value)), list(kind.values(value))
        else:
            items = _contents(value, base)
            yield "[{}]", range(len(items)), items
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
    numpy = sys.modules.get("numpy")
    known = (*_IMMUTABLE, *_BUILTIN, *_ARRAYS, Tensor, nn.Module, torch.Generator, random.Random)
    if isinstance(value, known) or any(map(is_of_library, kind.__mro__)):
        return True
    if numpy is not None and kind.__module__.partition(".")[0] == "numpy":
        return True
    return not _hides_state(kind, object)


@cache
def _hides_state(kind: Any, base: Any) -> bool:
    """Whether objects of a class keep state in memory besides the base class, attributes and slots."""
    spaces = [vars(base_class) for base_class in kind.__mro__[: kind.__mro__.index(base)]]
    slots = [space.get("__slots__", ()) for space in spaces]
    count = sum(1 if isinstance(names, str) else len(names) for names in slots)
    own = (count + 2) * tuple.__itemsize__  # a pointer for every slot, __dict__ and __weakref__
    in_python = base is not object or any("__dict__" in space or "__slots__" in space for space in spaces)
    return not in_python or bool(kind.__basicsize__ > base.__basicsize__ + own)
