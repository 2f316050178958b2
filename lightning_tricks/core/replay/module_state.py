"""The state of a module that a training step may change by itself, kept and restored."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_tricks.core.replay.containers import (
    SIMPLE,
    Contents,
    bytes_in,
    contents_of,
    is_of_library,
    is_plain,
    restorer,
    run_all,
)
from lightning_tricks.core.replay.data_watch import (
    data_of,
    give_memory,
    is_freed,
    restore_data,
    versions,
    watching_data,
)
from lightning_tricks.core.weights.tensors import bits, same_values

_STRUCTURE = frozenset(nn.Module().__dict__)  # submodules, parameters, hooks


class ModuleState:
    """The buffers and attributes of a module and its submodules, and the weights that a step writes by itself.

    Tensors (BatchNorm statistics, torchmetrics), numbers, generators and arrays are restored. So are nested containers:
    lists, dictionaries, sets and deques of every kind, with their order, limits and attributes, named tuples,
    dataclasses, and every container and object that is written in Python, and the attributes of TorchScript modules.
    Files, closures, and objects that hold such or an object written in C, are left: ``refuse_counts`` raises if a
    number in one has changed. Attributes of classes, and objects of torch and Lightning such as data sets, are ignored.

    Weights are large and seldom written by a step (a momentum encoder, a codebook), and so are tensors inside
    containers. They are copied when a step that runs in ``watching()`` takes their ``.data``, through which it may
    write, and restored. What a step writes into them in other ways, ``refuse_writes`` finds and refuses.

    Args:
        module: The module.
        deep: Whether to copy tensors inside containers at once, and the weights of modules in them.
        compared: Whether ``changed`` will be called, for which arrays and random generators are copied once more.

    Raises:
        MisconfigurationException: For a container that cannot be restored exactly, with its path.
    """

    def __init__(self, module: nn.Module, *, deep: bool = False, compared: bool = False) -> None:
        self._module, self._deep, self._compared = module, deep, compared
        self._spaces: list[tuple[str, Any, dict[str, Any]]] = []  # paths, dictionaries and copies of them
        self._restore: list[Callable[[], object]] = []
        self._copied: dict[int, tuple[Tensor, Any, Tensor, str]] = {}  # tensors, their versions, contents, paths; by id
        # Weights, and tensors that are not copied, by id: what changes when they are written (None if they may be),
        # and their paths. A step that takes the .data of one moves it to those that it has touched.
        self._watched: dict[int, tuple[Tensor, Any, str]] = {}
        self._touched: list[Tensor] = []
        self._counted: list[tuple[Any, Any, str]] = []  # objects, the numbers in them, and their paths
        self._containers: list[tuple[Any, list[Contents], str]] = []  # containers, what is in them, and their paths
        self._bytes: list[tuple[Any, bytes, str]] = []  # arrays and random generators, what they hold, and their paths
        self._seen: set[int] = set()
        self._weights: set[int] = set()  # ids of parameters
        self._lazy: list[tuple[Tensor, str]] = []  # tensors of lazy layers, which a step will make, and their paths
        self._root = type(module).__name__
        self._registered = {id(weight) for weight in module.parameters()} if deep else set()
        self._note_modules(module, self._root)

    def _note_modules(self, module: nn.Module, path: str) -> None:
        modules = list(module.named_modules())
        # First all weights: an RNN of torch holds its own in a list, too.
        self._weights.update(id(weight) for _, child in modules for weight in child._parameters.values())
        for name, child in modules:
            self._note_module(child, f"{path}.{name}" if name else path)

    def _note_module(self, module: nn.Module, path: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        spaces: list[Any] = [module.__dict__, module._buffers]
        if isinstance(module, torch.jit.ScriptModule):
            spaces.append(_ScriptAttributes(module))
        self._spaces += [(path, space, dict(space)) for space in (*spaces, module._parameters, module._modules)]
        for name, weight in module._parameters.items():
            if weight is not None and is_lazy(weight):
                self._lazy.append((weight, f"{path}.{name}"))
            elif weight is not None and not weight.is_inference():
                self._note_weight(weight, f"{path}.{name}", module)
        for space in spaces:
            for name, value in space.items():
                if name in _STRUCTURE or isinstance(value, SIMPLE) or _is_constant(value):
                    continue
                if isinstance(value, Tensor) and id(value) not in self._weights:
                    self._note_tensor(value, f"{path}.{name}")
                else:
                    self._note(value, f"{path}.{name}")

    def _note_weight(self, weight: Tensor, path: str, owner: nn.Module) -> None:
        # Of one number: a temperature or a scale, which steps like to bound.
        copied = weight.numel() == 1 or (self._deep and id(weight) not in self._registered)
        if copied and not (_is_moved(weight) or is_freed(weight)) and id(weight) not in self._watched:
            self._note_tensor(weight, path, data_of(weight))
            self._watched[id(weight)] = weight, None, path
        elif isinstance(owner, _EMBEDDINGS) and owner.max_norm is not None:
            self._watched[id(weight)] = weight, None, path  # bounding its rows once more changes nothing
        else:
            self._watched.setdefault(id(weight), (weight, weight._version, path))

    def _note_tensor(self, value: Tensor, path: str, data: Tensor | None = None) -> None:
        """Remember the contents of a tensor.

        Args:
            value: The tensor.
            path: Its path.
            data: The ``.data`` of a weight, or of another tensor that a step has taken it of, through which it is
                restored; None for other tensors, of which graphs must notice that they are written.
        """
        if is_lazy(value):
            self._lazy.append((value, path))
        elif not (value.is_inference() or _is_expanded(value)):
            contents = bits(value).clone()
            self._copied[id(value)] = value, versions([value]), contents, path
            if data is None:
                self._restore.append(partial(_restore_buffer, value, bits(value), contents))
            else:
                self._restore.append(partial(restore_data, value, data, contents))
            if type(value) not in (Tensor, nn.Parameter) and not is_traceable_wrapper_subclass(value):
                deep, self._deep = self._deep, True  # tensors that belong to this one are written with it
                self._note(vars(value), path)
                self._deep = deep

    def _note(self, value: Any, path: str) -> None:
        """Remember how to restore a value that is not immutable."""
        if isinstance(value, Tensor):
            if id(value) in self._weights or value.is_inference():
                return
            if self._deep:
                self._note_tensor(value, path)
            else:
                self._watched.setdefault(id(value), (value, versions([value]), path))
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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy the tensors whose ``.data`` is read or set inside the block, so that ``restore`` restores them, too."""
        with watching_data(self._watched, self._copy):
            yield

    def _copy(self, tensor: Tensor) -> None:
        _, mark, path = self._watched[id(tensor)]
        # One that was written has lost what it held.
        if _mark(tensor, mark) == mark and not (_is_moved(tensor) or is_freed(tensor)):
            del self._watched[id(tensor)]
            self._touched.append(tensor)
            if id(tensor) not in self._copied:
                self._note_tensor(tensor, path, data_of(tensor))

    def now(self) -> ModuleState:
        """The state of the module at present, with copies of the tensors that this state has copied since."""
        state = ModuleState(self._module, deep=self._deep)
        for tensor in self._touched:
            if id(tensor) in state._watched:
                state._copy(tensor)
        return state

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every attribute and its contents, as far as each lets itself be restored.

        Raises:
            Exception: Of what could not be restored, once all others are.
        """
        run_all([*(partial(_restore_names, space, before) for _, space, before in self._spaces), *self._restore])

    def written(self) -> str | None:
        """The path of a weight, or of a tensor inside a container, that is not as it was; None if all are."""
        touched = {id(tensor) for tensor in self._touched}
        for tensor, ((version, _),), contents, path in self._copied.values():
            maybe = id(tensor) in touched or (id(tensor) in self._weights and tensor._version != version)
            if maybe and not (is_freed(tensor) or same_values(bits(tensor), contents)):
                return path
        return next((path for tensor, mark, path in self._watched.values() if _mark(tensor, mark) != mark), None)

    def refuse_writes(self) -> None:
        """Raise if a tensor was written that was not copied, or a lazy one made, which ``restore`` cannot undo.

        Raises:
            MisconfigurationException: With the path of the tensor.
        """
        for tensor, mark, path in self._watched.values():
            if _mark(tensor, mark) != mark:
                what, remedy = f"tensor {path}", "make a new tensor, or register it as a buffer, which is restored"
                if id(tensor) in self._weights:
                    kind = "parameter" if tensor.requires_grad else "frozen parameter"
                    what = f"{kind} {path.removeprefix(self._root + '.')}"
                    remedy = "update it in on_train_batch_end, or by its .data, which is restored"
                raise MisconfigurationException(
                    f"A step of {self._root} writes into the {what}, and a second run of the step would do so again:"
                    f" {remedy}."
                )
        for tensor, path in self._lazy:
            if not is_lazy(tensor):  # what it was drawn with, a second run would draw for something else
                raise MisconfigurationException(
                    f"A step of {self._root} makes the lazy tensor {path.removeprefix(self._root + '.')}, and a second"
                    " run of the step would not, and so have other random numbers: run a batch through the module"
                    " before the fit."
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
            now = before if isinstance(space, _ScriptAttributes) else dict(space.items())
            for name in {**now, **before}:
                if name not in _STRUCTURE and not _same(now.get(name, _GONE), before.get(name, _GONE)):
                    return f"{path}.{name}"
        for container, groups, path in self._containers:
            if any(
                keys != before_keys or len(items) != len(before_items) or not all(map(_same, items, before_items))
                for (_, keys, items), (_, before_keys, before_items) in zip(contents_of(container), groups, strict=True)
            ):
                return path
        for tensor, mark, path in self._watched.values():
            if _mark(tensor, mark) != mark:
                return path
        for tensor, version, contents, path in self._copied.values():
            if is_freed(tensor):
                continue
            if versions([tensor]) != version if tensor.is_nested else not same_values(bits(tensor), contents):
                return path
        return next((path for value, held, path in self._bytes if bytes_in(value) != held), None)


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_GONE = object()
_SIMPLE_TYPES = frozenset(SIMPLE)


def _is_constant(value: Any) -> bool:
    """Whether a value is a tuple of numbers and names, such as the stride of a convolution, of which a CNN has many."""
    return type(value) is tuple and all([type(item) in _SIMPLE_TYPES for item in value])


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, SIMPLE) and type(a) is type(b) and a == b)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several entries of a tensor share memory, so that it cannot be written to."""
    return tensor.layout == torch.strided and not tensor.is_nested and 0 in tensor.stride()


def _mark(tensor: Tensor, like: Any) -> Any:
    """What changes when something is written into a tensor, in the form of an earlier one; None for any write."""
    return None if like is None else versions([tensor]) if isinstance(like, list) else tensor._version


def _is_moved(weight: Tensor) -> bool:
    """Whether ZeRO-3 moves a weight, by its ``.data``."""
    return hasattr(weight, "ds_id")


def _restore_names(space: Any, before: dict[str, Any]) -> None:
    """Restore which names a dictionary has, and the objects that they stand for."""
    now = space if isinstance(space, dict) else dict(space.items())
    for name in now.keys() - before.keys():
        del space[name]
    for name, value in before.items():
        held = now.get(name, _GONE)
        if held is not value and not (isinstance(held, DTensor) or isinstance(value, DTensor)):  # FSDP2 exchanges those
            space[name] = value


def _restore_buffer(tensor: Tensor, data: Tensor, contents: Tensor) -> None:
    give_memory(tensor, data)
    data.copy_(contents)


class _ScriptAttributes:
    """The attributes of a TorchScript module as a dictionary: they are kept in C++, and lists come as copies."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._held = module._c
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(self._held._type())
        attributes = kind.get_attributes()
        self._names = [name for name in attributes if name not in module._parameters and name not in module._buffers]

    def keys(self) -> list[str]:
        return self._names

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self._names]

    def __getitem__(self, name: str) -> Any:
        return self._held.getattr(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._held.setattr(name, value)


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
