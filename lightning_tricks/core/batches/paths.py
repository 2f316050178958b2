"""Paths into batches of any structure: parts are found by them, and replaced in a copy of the batch."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

Name = str | int
Names = Name | list[Name] | None  # what a user passes: a key, an index, a path with dots, or a list of those
Path = tuple[Name, ...]

TARGETS = ("labels", "label", "targets", "target", "y")
INPUTS = (
    "pixel_values", "input_values", "input_features", "inputs", "input", "images", "image", "img", "x", "features",
    "input_ids", "inputs_embeds",
)  # fmt: skip
_USUAL = {*TARGETS, *INPUTS}


def path_of(name: Name) -> Path:
    """The path of a key, an index, or several of them with dots between.

    >>> path_of("batch.0.labels"), path_of(1)
    (('batch', 0, 'labels'), (1,))
    """
    return tuple(int(part) if re.fullmatch("-?[0-9]+", part) else part for part in str(name).split("."))


def get(batch: Any, path: Path) -> Any:
    """The part of a batch at a path.

    Raises:
        LookupError: If there is none.
    """
    for name in path:
        if isinstance(batch, Tensor):  # its entries are no parts of the batch
            raise LookupError(name)
        if isinstance(batch, Mapping):
            batch = batch[name if name in batch else str(name)]
        elif isinstance(name, int):
            batch = batch[name]
        elif hasattr(batch, name):
            batch = getattr(batch, name)
        else:
            raise LookupError(name)
    return batch


def put(batch: Any, path: Path, value: Any) -> Any:
    """The batch with a value at a path; containers on the path are copied, and all else is shared."""
    if not path:
        return value
    name, *rest = path
    inner = put(get(batch, (name,)), tuple(rest), value)
    if isinstance(batch, tuple):
        items = list(batch)
        items[name if isinstance(name, int) else fields(batch).index(name)] = inner
        return type(batch)(*items) if fields(batch) else type(batch)(items)
    try:
        new = copy.copy(batch)
    except Exception as error:
        raise MisconfigurationException(
            f"{spelled((name,))} cannot be changed: the batch, a {type(batch).__name__}, cannot be copied"
            f" ({type(error).__name__}: {error}). Give it a __copy__, or have the collate function return a dict."
        ) from error
    if isinstance(batch, Mapping):
        new[name if name in batch else str(name)] = inner
    elif isinstance(name, int):
        new[name] = inner
    else:
        object.__setattr__(new, name, inner)  # a frozen dataclass allows this, too
    if get(batch, (name,)) is inner or get(new, (name,)) is not inner:
        raise MisconfigurationException(
            f"{spelled((name,))} cannot be changed in a copy of the batch, a {type(batch).__name__}: its class shares"
            " what it holds with its copies. Give it a __copy__, or have the collate function return a dict."
        )
    return new


def is_read_only(container: Any) -> bool:
    """Whether the entries of a container cannot be set in a copy of it."""
    return isinstance(container, Mapping) and not hasattr(container, "__setitem__")


def find(batch: Any, names: Sequence[str], position: int) -> list[Path]:
    """The paths where inputs or targets may be: under one of the names, or at the position in a pair."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and _USUAL.isdisjoint(fields(batch)):
        return [(position, *inner) for inner in _named(batch[position], names)]
    return [] if isinstance(batch, Tensor) else _named(batch, names)


def _named(batch: Any, names: Sequence[str]) -> list[Path]:
    if isinstance(batch, Tensor):
        return [()]
    named = [(name, value) for name, value in parts(batch) if str(name).lower() in names]
    return [(name, *inner) for name, value in named for inner in _named(value, names)]


def locate(batch: Any, asked: Names, names: Sequence[str], position: int) -> list[Path]:
    """The paths of the tensors that a user asked for, or else of those that are found; empty if one is missing."""
    if asked is None:
        return find(batch, names, position)
    several = asked if isinstance(asked, list | tuple) else [asked]
    paths = [(name,) if _get(batch, (name,)) is not None else path_of(name) for name in several]  # a key may have dots
    return paths if all(isinstance(_get(batch, path), Tensor) for path in paths) else []


def other_samples(batch: Any, target: Path) -> list[Path]:
    """The containers with inputs and targets of their own, of the same structure as those around a target.

    A loader of several data sets puts a batch of each beside the others, as do semi-supervised ones: their samples have
    nothing in common. Views of the same samples, whose targets are equal, are not meant, and neither are containers
    without targets, such as the anchors and the positives of metric learning.

    >>> import torch
    >>> one, two = ({"x": torch.rand(2, 3), "y": torch.tensor(labels)} for labels in ([0, 1], [1, 1]))
    >>> other_samples([one, two], (1, "y")), other_samples([one, dict(one)], (1, "y"))
    ([(0,)], [])
    """
    found: list[Path] = []
    for depth in range(1, len(target)):
        mine, inner = get(batch, target[:depth]), target[depth:]
        inputs = [path for path in find(mine, INPUTS, 0) if _kind(mine, path) != _kind(mine, inner)]
        if not inputs or inner not in find(mine, TARGETS, 1):
            continue
        for name, other in parts(get(batch, target[: depth - 1])):
            alike = [_kind(mine, path) == _kind(other, path) for path in (*inputs, inner)]
            if other is not mine and all(alike) and not torch.equal(get(mine, inner), get(other, inner)):
                found.append((*target[: depth - 1], name))
    return found


def _kind(batch: Any, path: Path) -> Any:
    """What tensors of two containers have in common if they mean the same."""
    part = _get(batch, path)
    return (part.dtype, part.shape[1:]) if isinstance(part, Tensor) and not part.is_nested else None


def is_attention_mask(path: Path) -> bool:
    """Whether a part is a mask of tokens by its name, also in floating-point numbers.

    >>> is_attention_mask(("text", "decoder_attention_mask")), is_attention_mask(("mask",))
    (True, False)
    """
    return bool(path) and re.search(r"(^|_)(attention|padding)_mask$", str(path[-1])) is not None


def check_names(argument: str, names: Names) -> None:
    """Raise unless ``names`` is a name, a list of names or None."""
    several = names if isinstance(names, list | tuple) else [names]
    if names is not None and not (
        several and all(isinstance(name, str | int) and not isinstance(name, bool) for name in several)
    ):
        raise TypeError(
            f"{argument} must be a key, an index, a path such as 'batch.0' or a list of those, got {names!r}."
        )


def parts(batch: Any) -> Iterator[tuple[Name, Any]]:
    """The names and values in a container; nothing for anything else."""
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif isinstance(batch, tuple | list):
        yield from enumerate(batch) if not fields(batch) else zip(fields(batch), batch, strict=True)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))


def mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with ``change`` applied to everything that is not a container."""
    if not list(parts(batch)):
        return change(batch)
    for name, value in list(parts(batch)):
        new = mapped(value, change)
        if new is not value:
            batch = put(batch, (name,), new)
    return batch


def walk(batch: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in a batch that is not a container, with its path."""
    inner = list(parts(batch))
    if not inner:
        yield path, batch
    for name, value in inner:
        yield from walk(value, (*path, name))


def walk_around(batch: Any, targets: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """The same, and the attributes of objects of other classes in which a target was found by its name.

    >>> from types import SimpleNamespace
    >>> batch = {"one": SimpleNamespace(y=0, weight=1), "two": SimpleNamespace(weight=2)}
    >>> [path for path, _ in walk_around(batch, [("one", "y")])]
    [('one', 'y'), ('one', 'weight'), ('two',)]
    """
    for path, part in walk(batch):
        inner = [target[len(path) :] for target in targets if target[: len(path)] == path != target]
        if not inner or isinstance(part, Tensor):
            yield path, part
            continue
        held = getattr(part, "__dict__", {})
        kept_inside = [get(part, target) for target in inner if target[0] not in held]  # as PyG's data in a store
        for name, value in held.items():
            within = [target[1:] for target in inner if target[0] == name]
            for rest, leaf in walk_around(value, within):
                if not any(leaf is target for target in kept_inside):
                    yield (*path, name, *rest), leaf


def spelled(path: Path) -> str:
    """A path as Python code, for an error message.

    >>> spelled(("labels", 0))
    "batch['labels'][0]"
    """
    return "".join(["batch", *(f"[{name!r}]" for name in path)])


def described(batch: Any, path: str = "") -> str:
    """The names, dtypes and shapes in a batch, for an error message.

    >>> import torch
    >>> described({"x": torch.zeros(2, 3), "meta": [1, "a"]})
    'x: float32 (2, 3), meta: 2 int'
    """
    if isinstance(batch, Tensor):
        shape = "nested" if batch.is_nested else tuple(batch.shape)
        return f"{path or 'a tensor'}: {str(batch.dtype).removeprefix('torch.')} {shape}"
    if isinstance(batch, tuple | list) and batch and all(isinstance(item, str | int | float) for item in batch):
        return f"{path or 'a list'}: {len(batch)} {type(batch[0]).__name__}"
    inner = [described(value, f"{path}.{name}".lstrip(".")) for name, value in list(parts(batch))[:12]]
    return ", ".join(inner) or f"{path or 'an object'}: {type(batch).__name__}"


def _get(batch: Any, path: Path) -> Any:
    try:
        return get(batch, path)
    except (LookupError, TypeError):
        return None


def fields(batch: Any) -> tuple[str, ...]:
    """The field names of a named tuple; empty for anything else."""
    return getattr(batch, "_fields", ())
