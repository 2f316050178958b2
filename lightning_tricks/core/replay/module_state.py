"""What a training step may change in a module besides its parameters, noted and restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


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
