"""The state that samplers and data sets have of their own: random generators, and attributes that change."""

from __future__ import annotations

import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tricks.core.exact.plain import NotPlain, content, plain, unplain

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)
_FEW = 100  # objects with states are in containers of so few; a data set may have millions of samples
SMALL = 10_000  # bytes of an attribute that is noted before it has changed


class Leaf(NamedTuple):
    """A random generator, an object with a state, or an attribute.

    Args:
        get: Function that gives the state.
        set: Function that sets it.
        changes: Whether it counts only if it has changed, as attributes do.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    changes: bool = False


class OwnState:
    """The state that objects have of their own, which is restored in other objects of the same making.

    These are random generators, objects with ``state_dict`` and ``load_state_dict``, and attributes that are plain
    values and change; one that does not is a setting, which a resumed run may have changed.

    Args:
        roots: The objects by their names, such as a sampler.
        apart: Objects that are left out with all that they hold, such as the data set that a sampler has, too.
    """

    def __init__(self, roots: Mapping[str, Any], apart: Collection[Any] = ()) -> None:
        self._roots = roots
        self._apart = apart
        self._changed: set[str] = set()
        self._first = {path: _pickled(leaf)[0] for path, leaf in self._leaves().items() if leaf.changes}

    def state(self) -> dict[str, Any]:
        """The state as plain values, by the paths of what they belong to; with small settings, for ``changed``."""
        found: dict[str, Any] = {}
        for path, leaf in self._leaves().items():
            checksum, size = _pickled(leaf) if leaf.changes else (None, 0)
            if leaf.changes and checksum != self._first.get(path):
                self._changed.add(path)
            if not leaf.changes or path in self._changed or 0 < size < SMALL:
                found[path] = plain(leaf.get())
        return found

    def changed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state without the settings, as far as they are known by now."""
        leaves = self._leaves()
        return {path: value for path, value in state.items() if path in self._changed or not leaves[path].changes}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, of these objects or of others of the same making."""
        walk = _Walk(self._roots, self._apart, attributes=True)
        for path, value in state.items():
            owner, _, name = path.rpartition(".")
            if path in walk.leaves:
                walk.leaves[path].set(unplain(value))
            elif owner in walk.owners:  # an attribute that these objects do not have yet
                setattr(walk.owners[owner], name, unplain(value))

    def _leaves(self) -> dict[str, Leaf]:
        return _Walk(self._roots, self._apart, attributes=True).leaves


def generators_in(roots: Mapping[str, Any]) -> dict[str, Leaf]:
    """The random generators that objects hold, in attributes and short containers, by their paths."""
    return _Walk(roots, (), attributes=False).leaves


class _Walk:
    """What objects hold, by its path.

    Args:
        roots: The objects by their names.
        apart: Objects that are left out.
        attributes: Whether attributes and objects with a ``state_dict`` count; data sets are left out then.
    """

    def __init__(self, roots: Mapping[str, Any], apart: Collection[Any], *, attributes: bool) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.owners: dict[str, Any] = {}
        self._seen = set(map(id, apart))
        self._attributes = attributes
        for name, root in roots.items():
            self._visit(root, name)

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, _DatasetSamplerWrapper):
            value = value._sampler  # what else it holds is the order of the present epoch
        if isinstance(value, MethodType):
            value = value.__self__
        apart = isinstance(value, _CODE) or (self._attributes and isinstance(value, Dataset))
        if apart or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if (generator := generator_leaf(value)) is not None:
            self.leaves[path] = generator
        elif self._attributes and hasattr(value, "load_state_dict") and hasattr(value, "state_dict"):
            self.leaves[path] = Leaf(value.state_dict, value.load_state_dict)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, path)
        elif isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items if len(value) <= _FEW else ():
                self._visit(item, f"{path}[{key!r}]")
        else:
            self.owners[path] = value
            for name, item in list(getattr(value, "__dict__", {}).items()):
                self._visit(item, f"{path}.{name}")
                if self._attributes and _may_be_plain(item):
                    self.leaves[f"{path}.{name}"] = Leaf(
                        partial(getattr, value, name), partial(_put, value, name), True
                    )


def generator_leaf(value: Any) -> Leaf | None:
    """How the state of a random generator is got and set; None for other objects."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return Leaf(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Leaf(value.getstate, value.setstate)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return Leaf(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return Leaf(value.get_state, value.set_state)
    return None


def _may_be_plain(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = (type(None), bool, int, float, str, list, tuple, dict, set, frozenset, deque, Tensor)
    return isinstance(value, kinds) or (numpy is not None and isinstance(value, numpy.ndarray | numpy.generic))


def _pickled(leaf: Leaf) -> tuple[int | None, int]:
    """The checksum and the size of what is plain; None and 0 for other values, which count as unchanged.

    The order of samples that depends on them is compared when it is replayed.
    """
    try:
        found = content(plain(leaf.get()))
    except NotPlain:
        return None, 0
    return zlib.crc32(found), len(found)


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, in place where it is a container or a tensor that others may hold, too."""
    present = getattr(owner, name)
    if isinstance(present, list) and isinstance(value, list):
        present[:] = value
    elif isinstance(present, deque) and isinstance(value, list):
        present.clear()
        present.extend(value)
    elif isinstance(present, dict | set) and isinstance(value, type(present)):
        present.clear()
        present.update(value)
    elif isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
        present.copy_(value)
    else:
        setattr(owner, name, frozenset(value) if isinstance(present, frozenset) else value)
