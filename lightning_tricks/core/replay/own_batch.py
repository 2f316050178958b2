"""The batch of a step that runs twice: containers of its own for every run, and no writes into its tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.core.replay.data_watch import versions, watching_data
from lightning_tricks.core.weights.tensors import bits, same_values


def with_own_batch(run: partial[Any]) -> partial[Any]:
    """The same run with copies of the batch's containers, so that the step may pop items from its own."""
    return partial(run.func, *copy_containers(run.args), **copy_containers(run.keywords))


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


@contextmanager
def forbid_writes(module: nn.Module, batch: Any) -> Iterator[None]:
    """Raise if a step of a module inside the block writes into its batch, which a second run of it would read.

    Raises:
        MisconfigurationException: If the step writes into its batch.
    """
    with noting_writes(module, batch) as refuse:
        yield
    refuse()


@contextmanager
def noting_writes(module: nn.Module, batch: Any) -> Iterator[Callable[[], None]]:
    """Note what a step of a module inside the block writes into its batch.

    Yields:
        A function that raises MisconfigurationException if the step has written into its batch, once it has ended.
    """
    found = _collected(batch)
    tensors = {id(value): value for value in found if isinstance(value, Tensor)}
    objects = [(value, dict(vars(value))) for value in found if not isinstance(value, Tensor)]
    before, copies = versions(list(tensors.values())), dict[int, Tensor]()

    def keep(tensor: Tensor) -> None:
        copies.setdefault(id(tensor), bits(tensor).clone())

    def refuse() -> None:
        changed = [held for held, names in objects if any(vars(held).get(n) is not a for n, a in names.items())]
        if changed:
            raise MisconfigurationException(
                f"{type(module).__name__}.training_step sets an attribute of a {type(changed[0]).__name__} in its"
                " batch, which a second run of it would see: use a new object, for example copy.copy of it."
            )
        written = versions(list(tensors.values())) != before
        if written or not all(same_values(bits(tensors[key]), copy) for key, copy in copies.items()):
            raise MisconfigurationException(
                f"{type(module).__name__}.training_step writes into its batch, which a second run of it would see: make"
                " a new tensor, for example x = x * 2 in place of x.mul_(2)."
            )

    with watching_data(tensors, keep):
        yield refuse
