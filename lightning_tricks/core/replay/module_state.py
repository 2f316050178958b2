"""The state of a module that a training step may change besides its parameters, kept and restored."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from types import CellType, FunctionType
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks.core.replay.containers import (
    SIMPLE,
    Contents,
    bytes_in,
    contents_of,
    is_of_library,
    is_plain,
    restorer,
)
from lightning_tricks.core.replay.rerun import versions

_STRUCTURE = frozenset(nn.Module().__dict__)  # submodules, parameters, hooks


class ModuleState:
    """The buffers and attributes of a module and its submodules, which a step may change.

    Tensors (BatchNorm statistics, torchmetrics), numbers, generators and arrays are restored. So are nested containers:
    lists, dictionaries, sets and deques of every kind, with their order, limits and attributes, named tuples,
    dataclasses, and every container and object that is written in Python. A tensor inside a container is copied with
    ``deep`` only, since there may be many: else ``refuse_writes`` raises if a step wrote into one. Files, closures, and
    objects that hold such or an object written in C, are left: ``refuse_counts`` raises if a number in one has changed.
    Attributes of classes, and objects of torch and Lightning such as data sets, are ignored.

    Args:
        module: The module.
        deep: Whether to copy tensors inside containers, too.
        compared: Whether ``changed`` will be called, for which arrays and random generators are copied once more.

    Raises:
        MisconfigurationException: For a container that cannot be restored exactly, with its path.
    """

    def __init__(self, module: nn.Module, *, deep: bool = False, compared: bool = False) -> None:
        self._module, self._deep, self._compared = module, deep, compared
        self._spaces: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # paths, dictionaries and copies of them
        self._restore: list[Callable[[], object]] = []
        self._copied: list[tuple[Tensor, Any, Tensor, str]] = []  # tensors, their versions, contents and paths
        self._written: list[tuple[Tensor, Any, str]] = []  # tensors inside containers, their versions and paths
        self._counted: list[tuple[Any, Any, str]] = []  # objects, the numbers in them, and their paths
        self._containers: list[tuple[Any, list[Contents], str]] = []  # containers, what is in them, and their paths
        self._bytes: list[tuple[Any, bytes, str]] = []  # arrays and random generators, what they hold, and their paths
        self._seen: set[int] = set()
        self._root = type(module).__name__
        self._note_modules(module, self._root)

    @cached_property
    def _weights(self) -> set[int]:
        """The ids of the registered parameters; an RNN of torch holds them in a list, too."""
        return {id(weight) for weight in self._module.parameters()}

    def _note_modules(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_modules():
            self._note_module(child, f"{path}.{name}" if name else path)

    def _note_module(self, module: nn.Module, path: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self._spaces += [(path, space, dict(space)) for space in (module.__dict__, module._buffers, module._modules)]
        for space in (module.__dict__, module._buffers):
            for name, value in space.items():
                if name in _STRUCTURE or isinstance(value, SIMPLE) or _is_constant(value):
                    continue
                if not isinstance(value, Tensor):
                    self._note(value, f"{path}.{name}")
                else:
                    self._note_tensor(value, f"{path}.{name}")

    def _note_tensor(self, value: Tensor, path: str) -> None:
        if not (value.is_inference() or is_lazy(value) or _is_expanded(value)):
            contents = value.detach().clone()
            self._copied.append((value, versions([value]), contents, path))
            self._restore.append(partial(_restore_tensor, value, value.detach(), contents))

    def _note(self, value: Any, path: str) -> None:
        """Remember how to restore a value that is not immutable."""
        if isinstance(value, Tensor):
            if self._deep:
                self._note_tensor(value, path)
            elif not (value.is_inference() or (value.requires_grad and id(value) in self._weights)):
                self._written.append((value, self._mark(value), path))
        elif isinstance(value, nn.Module):  # a module in a container, which is not registered
            self._note_modules(value, path)
        elif id(value) in self._seen:
            return
        elif (restore := restorer(value, path)) is not None:
            self._restore.append(restore)
            self._note_contents(value, path)
            if self._compared and (held := bytes_in(value)) is not None:
                self._bytes.append((value, held, path))
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            raise MisconfigurationException(
                f"{path} is an iterator ({type(value).__name__}), which cannot be set back for a second run of the"
                " step: keep a list and a position, or keep it outside of the module, in the data set for example."
            )
        elif isinstance(value, io.IOBase | FunctionType) or is_plain(value):
            self._seen.add(id(value))
            self._counted.append((value, _numbers_in(value), path))
            for name, item in getattr(value, "__dict__", {}).items():
                if isinstance(item, Iterator | FunctionType):
                    self._note(item, f"{path}.{name}")

    def _note_contents(self, value: Any, path: str) -> None:
        self._seen.add(id(value))
        groups = list(contents_of(value))
        self._containers.append((value, groups, path))
        for form, keys, items in groups:
            if not set(map(type, items)) <= _SIMPLE_TYPES:  # a long list of numbers costs no time
                for key, item in zip(keys, items, strict=True):
                    if not isinstance(item, SIMPLE):
                        self._note(item, path + form.format(key))

    def _mark(self, tensor: Tensor) -> Any:
        """What changes when something is written into a tensor, or when it is moved, unless it is a weight."""
        return tensor._version if id(tensor) in self._weights else versions([tensor])  # ZeRO-3 moves weights

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
            if self._mark(tensor) != version:
                raise MisconfigurationException(
                    f"A step of {self._root} writes into the tensor {path}, and a second run of the step would do so"
                    " again: make a new tensor, or register it as a buffer, which is restored."
                )

    def refuse_counts(self) -> None:
        """Raise if a number has changed in an object that ``restore`` cannot restore.

        Raises:
            MisconfigurationException: With the path of the object.
        """
        for value, before, path in self._counted:
            if _numbers_in(value) != before:
                raise MisconfigurationException(
                    f"{path} ({type(value).__name__}) has changed in a step of {self._root} that is repeated or undone,"
                    " and it is or holds what cannot be set back: a file, a closure or an object that is written in C."
                    " Keep plain numbers in the module, or change it in on_train_batch_end, which is not repeated."
                )

    def can_restore(self) -> bool:
        """Whether the module holds no numbers that ``restore`` cannot restore."""
        return all(number is None for _, numbers, _ in self._counted for number in numbers)

    def changed(self) -> str | None:
        """The path of an attribute, container, array, generator or tensor that is not as it was; None if all are."""
        for path, space, before in self._spaces:
            for name in {**space, **before}:
                if name not in _STRUCTURE and not _same(space.get(name, _GONE), before.get(name, _GONE)):
                    return f"{path}.{name}"
        for container, groups, path in self._containers:
            now = list(contents_of(container))
            if any(
                keys != before_keys or len(items) != len(before_items) or not all(map(_same, items, before_items))
                for (_, keys, items), (_, before_keys, before_items) in zip(now, groups, strict=True)
            ):
                return path
        for tensor, version, contents, path in self._copied:
            if versions([tensor]) != version and not _equal(tensor, contents):
                return path
        return next((path for value, held, path in self._bytes if bytes_in(value) != held), None)


_GONE = object()
_SIMPLE_TYPES = frozenset(SIMPLE)


def _is_constant(value: Any) -> bool:
    """Whether a value is a tuple of numbers and names, such as the stride of a convolution, of which a CNN has many."""
    return type(value) is tuple and all([type(item) in _SIMPLE_TYPES for item in value])


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, SIMPLE) and type(a) is type(b) and a == b)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, NaN included; nested ones, which torch cannot compare, never do."""
    if a.is_nested or a.shape != b.shape:
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several entries of a tensor share memory, so that it cannot be written to."""
    return tensor.layout == torch.strided and not tensor.is_nested and 0 in tensor.stride()


def _restore_tensor(tensor: Tensor, data: Tensor, contents: Tensor) -> None:
    if versions([tensor])[0][1] != versions([data])[0][1]:  # its .data was set
        tensor.data = data
    data.copy_(contents)


def _numbers_in(value: Any) -> list[Any]:
    """The numbers in an object: attributes, variables of a closure, lengths of lists in them, positions in files."""
    if isinstance(value, io.IOBase):
        return [_number(value)]
    if isinstance(value, FunctionType):
        return [] if is_of_library(value) else [_number(cell) for cell in value.__closure__ or ()]
    return [_number(item) for _, _, items in contents_of(value) for item in items]


def _number(value: Any) -> Any:
    if isinstance(value, CellType):
        with suppress(ValueError):  # of an empty one
            return _number(value.cell_contents)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, list | deque):
        return len(value)
    if isinstance(value, io.IOBase) and getattr(value, "name", "") not in ("<stdout>", "<stderr>"):
        with suppress(OSError, ValueError):  # of a pipe, or of a file that is closed or being read line by line
            return value.tell()
    return None
