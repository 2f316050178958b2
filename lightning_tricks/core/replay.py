"""Running a step again: from the same batch, the same random numbers and the same state of the module."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

RandomState = dict[str, Any]


def random_state(device: torch.device) -> RandomState:
    """The state of the generators that a step on ``device`` may draw from: torch, the device, Python, NumPy."""
    state: RandomState = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Let the generators go on from a state that ``random_state`` gave."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


@contextmanager
def random_numbers_of(state: RandomState, device: torch.device) -> Iterator[None]:
    """Draw from ``state`` inside the block; the generators go on afterwards as if it had not run."""
    outside = random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(outside, device)


_again = ContextVar("_again", default=False)
_runs = count()
_run = ContextVar("_run", default=-1)


def first_run() -> None:
    """What runs from here on may be run again."""
    _run.set(next(_runs))


@contextmanager
def run_again() -> Iterator[None]:
    """What runs inside the block is what has run since ``first_run``."""
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def runs_again() -> bool:
    """Whether a step that has run before is run again."""
    return _again.get()


def run_number() -> int:
    """Tells one run from another; the same when it is run again."""
    return _run.get()


class ModuleState:
    """What a step may change of a module besides its parameters: buffers and attributes, its submodules' too.

    That covers the statistics of BatchNorm, torchmetrics, carried tensors, counters, generators, and lists,
    dictionaries, sets and deques within each other. Objects of other kinds are not looked into.
    """

    def __init__(self, module: nn.Module, owners: Iterable[nn.Module] | None = None) -> None:
        owners = module.modules() if owners is None else owners  # those of them that may change
        spaces = [s for owner in owners for s in (owner.__dict__, owner._buffers, owner._modules)]
        self._spaces = [(space, dict(space)) for space in spaces]
        self._restore: list[Callable[[], object]] = []
        seen: set[int] = set()
        for space in spaces:
            for name, value in space.items():
                if name not in _STRUCTURE:
                    self._note(value, seen)

    def _note(self, value: Any, seen: set[int]) -> None:
        """Remember how to put back what can change inside a value."""
        if isinstance(value, Tensor):
            if not value.is_inference() and 0 not in value.stride():  # which torch refuses to write into
                self._restore.append(partial(value.detach().copy_, value.detach().clone()))
        elif isinstance(value, torch.Generator):
            self._restore.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            inner = list(value.values() if isinstance(value, dict) else value)
            if not isinstance(value, tuple):
                self._restore.append(partial(refill, value, list(value.items()) if isinstance(value, dict) else inner))
            for each in inner:
                if isinstance(each, _CONTAINERS):  # tensors in there may be many; they are taken as they are
                    self._note(each, seen)

    @torch.no_grad()
    def restore(self) -> None:
        """Put every attribute, and what is in it, back to what it was."""
        for space, before in self._spaces:
            for name in space.keys() - before.keys():
                del space[name]
            for name, value in before.items():
                if space.get(name) is not value:
                    space[name] = value
        for restore in self._restore:
            restore()


_STRUCTURE = frozenset(nn.Module().__dict__)  # submodules, parameters, hooks
_CONTAINERS = (list, dict, set, deque, tuple)


def refill(container: Any, contents: list[Any]) -> None:
    """Put back what a list, a deque, a set or a dictionary (its items) held, in its order."""
    container.clear()
    if isinstance(container, dict):
        dict.update(container, contents)  # a Counter's own update counts
    else:
        (container.extend if isinstance(container, list | deque) else container.update)(contents)


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
def no_writes(module: nn.Module, batch: Any) -> Iterator[None]:
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


def find_node(loss: Tensor, wanted: Callable[[str], bool]) -> str | None:
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


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers draw from."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
