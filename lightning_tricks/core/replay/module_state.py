"""The state of a module that a training step may change besides its parameters, kept and restored."""

from __future__ import annotations

import array
import dataclasses
import io
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks.core.replay.rerun import versions

_STRUCTURE = frozenset(nn.Module().__dict__)  # submodules, parameters, hooks
_BUILTIN = (OrderedDict, defaultdict, dict, list, deque, set, tuple, frozenset)  # OrderedDict before dict
_ARRAYS = (bytearray, array.array)
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, type, range)


class ModuleState:
    """The buffers and attributes of a module and its submodules, which a step may change.

    Tensors (BatchNorm statistics, torchmetrics), numbers, generators and arrays are restored. So are nested containers:
    lists, dictionaries, sets and deques of every kind, with their order, limits and attributes, named tuples,
    dataclasses, and every container that is written in Python. Other objects are ignored. A tensor inside a container
    is not copied, since there may be many: ``refuse_writes`` raises if a step wrote into one.

    Args:
        module: The module.
        owners: The submodules that may change; None for all.

    Raises:
        MisconfigurationException: For a container that cannot be restored exactly, with its path.
    """

    def __init__(self, module: nn.Module, owners: Iterable[nn.Module] | None = None) -> None:
        self._spaces: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # paths, dictionaries and copies of them
        self._restore: list[Callable[[], object]] = []
        self._written: list[tuple[Tensor, Any, str]] = []  # tensors inside containers, their versions and paths
        self._containers: list[tuple[Any, list[Any], str]] = []  # containers, what is in them, and their paths
        self._seen: set[int] = set()
        self._root = type(module).__name__
        if owners is None:
            self._note_modules(module, self._root)
        else:
            for owner in owners:
                self._note_module(owner, self._root)

    def _note_modules(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_modules():
            self._note_module(child, f"{path}.{name}" if name else path)

    def _note_module(self, module: nn.Module, path: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        for space in (module.__dict__, module._buffers, module._modules):
            self._spaces.append((path, space, dict(space)))
            for name, value in space.items():
                if name in _STRUCTURE or isinstance(value, _SIMPLE):
                    continue
                if not isinstance(value, Tensor):
                    self._note(value, f"{path}.{name}")
                elif not (value.is_inference() or is_lazy(value) or _is_expanded(value)):
                    self._restore.append(partial(_restore_tensor, value, value.detach(), value.detach().clone()))

    def _note(self, value: Any, path: str) -> None:
        """Remember how to restore a value that is not immutable."""
        if isinstance(value, Tensor):
            if not value.is_inference():
                self._written.append((value, versions([value]), path))
        elif isinstance(value, nn.Module):  # a module in a container, which is not registered
            self._note_modules(value, path)
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            raise MisconfigurationException(
                f"{path} is an iterator ({type(value).__name__}), which cannot be set back for a second run of the"
                " step: keep a list and a position, or keep it outside of the module, in the data set for example."
            )
        elif id(value) not in self._seen and (restore := restorer(value, path)) is not None:
            self._seen.add(id(value))
            self._restore.append(restore)
            items = [*_inside(value)]
            self._containers.append((value, items, path))
            for name, inner in items:
                if not isinstance(inner, _SIMPLE):
                    self._note(inner, f"{path}{name}")

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every attribute and its contents."""
        for _, space, before in self._spaces:
            for name in space.keys() - before.keys():
                del space[name]
            for name, value in before.items():
                if space.get(name) is not value:
                    space[name] = value
        for restore in self._restore:
            restore()

    def refuse_writes(self) -> None:
        """Raise if something was written into a tensor inside a container, which ``restore`` cannot undo.

        Raises:
            MisconfigurationException: With the path of the tensor.
        """
        for tensor, version, path in self._written:
            if versions([tensor]) != version:
                raise MisconfigurationException(
                    f"{self._root}.training_step writes into the tensor {path}, and a second run of the step would"
                    " do so again: make a new tensor, or register it as a buffer, which is restored."
                )

    def changed(self) -> str | None:
        """The path of an attribute or a container that is not as it was; None if all are."""
        for path, space, before in self._spaces:
            for name in {**space, **before}:
                if name not in _STRUCTURE and not _same(space.get(name, _GONE), before.get(name, _GONE)):
                    return f"{path}.{name}"
        for container, items, path in self._containers:
            now = [*_inside(container)]
            if len(now) != len(items) or not all(
                key == before and _same(item, old) for (key, item), (before, old) in zip(now, items, strict=True)
            ):
                return path
        return None


_GONE = object()


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, _SIMPLE) and type(a) is type(b) and a == b)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several entries of a tensor share memory, so that it cannot be written to."""
    return tensor.layout == torch.strided and not tensor.is_nested and 0 in tensor.stride()


def _restore_tensor(tensor: Tensor, data: Tensor, contents: Tensor) -> None:
    if versions([tensor])[0][1] != versions([data])[0][1]:  # its .data was set
        tensor.data = data
    data.copy_(contents)


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


def restorer(value: Any, path: str, *, strict: bool = True) -> Callable[[], None] | None:
    """A function that restores a container's present contents, order and attributes; None for other objects.

    Args:
        value: A container, or any other object.
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
        return None
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


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """The items and attributes of a container, with the ends of their paths."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype != object:
            return
        yield from ((f".flat[{place}]", item) for place, item in enumerate(value.flat))
        return
    base = next((kind for kind in _BUILTIN if isinstance(value, kind)), None)
    if base is not None:
        pairs = _contents(value, base) if issubclass(base, dict) else enumerate(_contents(value, base))
        yield from ((f"[{key!r}]", item) for key, item in pairs)
    if not isinstance(value, _ARRAYS):
        yield from ((f".{name}", attribute) for name, attribute in _attributes(value))


@cache
def _hides_state(kind: Any, base: Any) -> bool:
    """Whether objects of a class keep state in memory besides the base class, attributes and slots."""
    slots = 0
    for base_class in kind.__mro__[: kind.__mro__.index(base)]:
        names = base_class.__dict__.get("__slots__", ())
        slots += 1 if isinstance(names, str) else len(names)
    pointer = tuple.__itemsize__
    return (
        kind.__basicsize__ > base.__basicsize__ + (slots + 2) * pointer
    )  # two more pointers for __dict__ and __weakref__
