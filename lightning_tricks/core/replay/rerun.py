"""Running a step again, from the same batch, random numbers and module state."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.core.replay.data_watch import watching_data
from lightning_tricks.core.weights.tensors import bits, same_values

_again = ContextVar("_again", default=False)
_runs = count()
_run = ContextVar("_run", default=-1)


def begin_run() -> None:
    """Begin a run that may be repeated."""
    _run.set(next(_runs))


@contextmanager
def replaying() -> Iterator[None]:
    """Repeat the run since ``begin_run`` inside the block."""
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def is_replaying() -> bool:
    """Whether a run is being repeated."""
    return _again.get()


def run_number() -> int:
    """The number of the present run; the same when it is repeated."""
    return _run.get()


def copy_containers(batch: Any) -> Any:
    """A batch of the same tensors in copied containers of the same classes and attributes.

    Removing items from one batch does not change the other. Objects that are not containers are shared.

    Example:
        >>> batch = {"x": [1, 2]}
        >>> copy_containers(batch)["x"].pop(), batch
        (2, {'x': [1, 2]})
    """
    if isinstance(batch, tuple):
        items = [copy_containers(item) for item in batch]
        same = all(new is old for new, old in zip(items, batch, strict=True))
        return batch if same else type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    new: Any
    if isinstance(batch, list | deque):
        new = copy.copy(batch)
        for place, item in enumerate(batch):
            new[place] = copy_containers(item)
        return new
    if isinstance(batch, MutableMapping):
        new = copy.copy(batch)
        if not isinstance(batch, dict) and all(new.__dict__.get(name) is held for name, held in vars(batch).items()):
            vars(new).update({name: copy_containers(held) for name, held in vars(batch).items()})
        for key, item in batch.items():
            if (inner := copy_containers(item)) is not item:
                new[key] = inner
        return new
    if isinstance(batch, set):
        return copy.copy(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        new = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(new, field.name, copy_containers(getattr(batch, field.name)))  # also of a frozen one
        return new
    return batch


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch, including attributes of objects in it."""
    return [value for value in _collected(batch) if isinstance(value, Tensor)]


def _collected(batch: Any) -> list[Any]:
    """The tensors of a batch, and its objects that are no containers, whose attributes every run of a step shares."""
    found: list[Any] = []
    _collect(batch, found, set())
    return found


def _collect(value: Any, found: list[Any], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    if id(value) in seen or isinstance(value, str | bytes | int | float | type(None) | type | nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: list[Any] = list(value.values())
    elif isinstance(value, list | tuple | set | deque):
        inner = list(value)
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        inner = list(getattr(value, "__dict__", {}).values())
        if inner:
            found.append(value)
    for item in inner:
        _collect(item, found, seen)


def versions(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Pairs of numbers that change when a tensor is written to or its ``.data`` is set."""
    # A sparse tensor has no memory of its own to point to.
    return [(0 if t.is_inference() else t._version, t.data_ptr() if t.layout == torch.strided else 0) for t in tensors]


@contextmanager
def forbid_writes(module: nn.Module, batch: Any) -> Iterator[None]:
    """Raise if a step of a module inside the block writes into its batch, which a second run of it would read.

    Raises:
        MisconfigurationException: If it does.
    """
    found = _collected(batch)
    tensors = {id(value): value for value in found if isinstance(value, Tensor)}
    objects = [(value, dict(vars(value))) for value in found if not isinstance(value, Tensor)]
    before, copies = versions(list(tensors.values())), dict[int, Tensor]()

    def keep(tensor: Tensor) -> None:
        copies.setdefault(id(tensor), bits(tensor).clone())

    with watching_data(tensors, keep):
        yield
    changed = [held for held, attributes in objects if any(vars(held).get(n) is not a for n, a in attributes.items())]
    if changed:
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step sets an attribute of a {type(changed[0]).__name__} in its batch,"
            " which a second run of it would see: use a new object, for example copy.copy of it."
        )
    written = versions(list(tensors.values())) != before
    if written or not all(same_values(bits(tensors[key]), copy) for key, copy in copies.items()):
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step writes into its batch, which a second run of it would see: make a"
            " new tensor, for example x = x * 2 in place of x.mul_(2)."
        )


@contextmanager
def naming_reentrant_checkpoints(loss: Tensor, trick: str) -> Iterator[None]:
    """Name a trick that takes the gradients of a loss by themselves, which torch's reentrant checkpoints do not allow.

    Raises:
        MisconfigurationException: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if find_graph_node(loss, "CheckpointFunctionBackward".__eq__):
            raise reentrant_checkpoint(trick) from error
        raise


def reentrant_checkpoint(trick: str) -> MisconfigurationException:
    """The error of a trick that needs gradients from inside of a reentrant checkpoint."""
    return MisconfigurationException(
        f"{trick} sees no gradient in a reentrant checkpoint: pass use_reentrant=False to torch.utils.checkpoint, or to"
        ' transformers as gradient_checkpointing_enable({"use_reentrant": False}).'
    )


def find_graph_node(loss: Tensor, wanted: Callable[[str], bool]) -> str | None:
    """The name of a ``wanted`` node in the graph of the loss; None if there is none."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if wanted(node.name()):
            return node.name()
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
    return None
