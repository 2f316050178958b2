"""The state that a fit changes, kept and restored: Trainer, optimizers, loaders, random generators and module."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import ClusterEnvironment
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_tricks.core.replay.containers import generator_restorer, restorer, run_all, write_dict
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.core.weights.tensors import bits


class ObjectState:
    """Keeps the state of Lightning's objects, optimizers, loaders and random generators, and of objects inside them."""

    def __init__(self) -> None:
        self._restore: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}

    def note(self, value: Any, *, deep: bool = False, any_class: bool = False, without: Sequence[Any] = ()) -> None:
        """Remember a value and its contents.

        Args:
            value: Any object.
            deep: Whether to copy tensors, arrays and long containers, too.
            any_class: Whether to remember the attributes of an object of any class.
            without: Objects to leave out.
        """
        self._seen |= {id(item): item for item in without}
        if isinstance(value, _IMMUTABLE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if restore := _restorer_of(value, deep):
            self._restore.append(restore)
        if isinstance(value, _CONTAINERS) and (deep or len(value) <= _LONG):
            inner = list(value.values() if isinstance(value, dict) else value)
            if (restore := restorer(value, type(value).__name__, strict=False)) is not None:
                self._restore.append(restore)
            for item in inner if len(inner) <= _LONG else ():
                self.note(item, deep=deep, any_class=any_class)
        if _has_state(value) or (any_class and hasattr(value, "__dict__") and not isinstance(value, _SKIPPED)):
            space = vars(value)
            self._restore.append(partial(write_dict, space, list(space.items())))
            for attribute in list(space.values()):
                self.note(attribute, deep=isinstance(value, _WITH_TENSORS))

    def restore(self) -> None:
        """Restore everything, also what comes after something that could not be restored."""
        run_all(self._restore)


class TrainedModuleState:
    """Keeps what a fit changes in a module: weights, gradients, buffers, attributes, submodules, hooks and sharding."""

    def __init__(self, module: nn.Module, state: ObjectState) -> None:
        self._shards = FSDP2(module)  # reshard() and local() also work for a module that is not sharded
        self._shards.reshard()
        self._state = ModuleState(module, deep=True)
        self._owners: list[tuple[Any, ...]] = []  # modules, their classes, and how to restore their structure
        self._weights: list[tuple[Any, ...]] = []  # the arguments of _restore_weight
        for owner in module.modules():
            structure = [restorer(vars(owner)[name], name) for name in _STRUCTURE if name in vars(owner)]
            self._owners.append((owner, type(owner), [restore for restore in structure if restore is not None]))
            state.note([value for name, value in vars(owner).items() if name not in _STRUCTURE])
        for weight in module.parameters():
            part, gradient = self._shards.local(bits(weight)), weight.grad
            assert part is not None, "FSDP2 has a part of every weight"
            gradients = None if gradient is None else (gradient, bits(gradient).clone())
            self._weights.append((weight, weight.requires_grad, part, part.clone(), gradients))

    def refuse_counts(self) -> None:
        """Raise if an object of the module has changed that cannot be restored, with its path."""
        self._state.refuse_counts()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, also what comes after something that could not be restored; can be called once."""
        owners = [partial(self._restore_owner, *kept) for kept in self._owners]
        weights = [partial(self._restore_weight, *kept) for kept in self._weights]
        run_all([self._shards.reshard, *owners, self._state.restore, *weights])

    def _restore_owner(self, owner: nn.Module, kind: type[nn.Module], structure: list[Callable[[], None]]) -> None:
        if type(owner) is not kind:
            owner.__class__ = kind
            _forget_sharding(owner)
        for restore in structure:
            restore()

    def _restore_weight(
        self, weight: nn.Parameter, trains: bool, part: Tensor, before: Tensor, gradients: tuple[Tensor, Tensor] | None
    ) -> None:
        weight.requires_grad_(trains)
        if not isinstance(weight, DTensor) and not _same_memory(weight, part):
            weight.data = part  # on its earlier device, in its earlier dtype
        now = self._shards.local(bits(weight))
        assert now is not None, "FSDP2 has a part of every weight"
        now.copy_(before)
        weight.grad = None
        if gradients is not None:
            weight.grad, held = gradients
            bits(weight.grad).copy_(held)


_STRUCTURE = frozenset(vars(nn.Module()))
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, type)
_LIGHTNING = ("lightning.pytorch.", "lightning.fabric.")
_CONTAINERS = (list, dict, set, deque, tuple)
_WITH_TENSORS = (Optimizer, torch.amp.GradScaler, Sampler)
_TORCH = (*_WITH_TENSORS, LRScheduler, DataLoader, Dataset)
_SKIPPED = (nn.Module, Callback, Logger, ClusterEnvironment, Enum, Tensor)
_LONG = 1000  # items; longer containers are data


def _has_state(value: Any) -> bool:
    lightnings = any(kind.__module__.startswith(_LIGHTNING) for kind in type(value).__mro__)
    return (isinstance(value, _TORCH) or lightnings) and hasattr(value, "__dict__") and not isinstance(value, _SKIPPED)


def _restorer_of(value: Any, deep: bool) -> Callable[[], object] | None:
    """A function that restores a random generator, a tensor or an array; None for other objects."""
    numpy = sys.modules.get("numpy")
    if (generator := generator_restorer(value)) is not None:
        return generator
    if deep and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return partial(bits(value).copy_, bits(value).clone())
    if deep and numpy and isinstance(value, numpy.ndarray):
        return partial(numpy.copyto, value, value.copy())
    return None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.device, a.dtype, a.data_ptr()) == (b.device, b.dtype, b.data_ptr())


def _forget_sharding(module: nn.Module) -> None:
    """Let ``fully_shard`` shard a module again, which it refuses otherwise."""
    from torch.distributed._composable_state import _module_state_mapping

    _module_state_mapping.pop(module, None)
