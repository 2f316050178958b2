"""Running a step again: from the same batch, the same random numbers and the same state of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

_again = ContextVar("_again", default=False)
_runs = count()
_run = ContextVar("_run", default=-1)


def begin_run() -> None:
    """What runs from here on may be run again."""
    _run.set(next(_runs))


@contextmanager
def replaying() -> Iterator[None]:
    """What runs inside the block is what has run since ``begin_run``."""
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def is_replaying() -> bool:
    """Whether a step that has run before is run again."""
    return _again.get()


def run_number() -> int:
    """Tells one run from another; the same when it is run again."""
    return _run.get()


def rebuilt(batch: Any) -> Any:
    """The same tensors in new tuples, lists and dictionaries: taking items out of one leaves the other whole."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor)


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch, wherever they are in it."""
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def versions(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Numbers for each tensor that move when something is written into it or its ``.data`` is set."""
    return [(0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors]


@contextmanager
def forbid_writes(module: nn.Module, batch: Any) -> Iterator[None]:
    """Raise if a step inside the block writes what a second run of it would find written.

    Raises:
        MisconfigurationException: For a write into the batch, or into a frozen parameter (of a teacher, say). Those
            that are trained may be written: what layers do there (an embedding's ``max_norm``) does no harm twice.
    """
    tensors = tensors_in(batch)
    frozen = {name: weight for name, weight in module.named_parameters() if not weight.requires_grad}
    before, kept = versions(tensors), versions(list(frozen.values()))
    yield
    if (now := versions(list(frozen.values()))) != kept:
        name = next(name for name, a, b in zip(frozen, kept, now, strict=True) if a != b)
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step writes into the frozen parameter {name}, which a second run of it"
            " would do again: update it in on_train_batch_end."
        )
    if versions(tensors) != before:
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step writes into its batch, which a second run of it would see: make a"
            " new tensor, for example x = x * 2 in place of x.mul_(2)."
        )


def find_graph_node(loss: Tensor, wanted: Callable[[str], bool]) -> str | None:
    """The name of a node of the loss's graph that is ``wanted``, if there is one."""
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
