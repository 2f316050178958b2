"""A trial fit with a single callback, after which everything that it has changed is restored."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from lightning_tricks.core.lightning.engine import TORCH, require_engine
from lightning_tricks.core.lightning.fit import NAME, fit_of
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import callbacks_of, launches_processes
from lightning_tricks.core.random_numbers import random_numbers_of, random_state
from lightning_tricks.core.replay.containers import generator_restorer, restorer, run_all, write_dict
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.core.weights.tensors import bits


def require_undoable(trainer: L.Trainer, module: Any, loaders: Any, trick: str) -> None:
    """Raise unless a fit with this Trainer, module and loaders can be undone."""
    module = getattr(module, "_orig_mod", module)  # the module inside torch.compile(module)
    require_same_lightning(trainer, trick)
    require_same_lightning(module, trick)
    if not isinstance(trainer, L.Trainer):
        raise TypeError(f"trainer must be a lightning.pytorch Trainer, got {type(trainer).__name__}.")
    if not isinstance(module, L.LightningModule):
        raise TypeError(f"module must be a LightningModule, got {type(module).__name__}.")
    several = loaders.values() if isinstance(loaders, dict) else loaders
    given = several if isinstance(loaders, dict | list | tuple) else [loaders]
    # An iterator without attributes is a generator or a list iterator, which can be read once only.
    if any(isinstance(loader, Iterator) and not hasattr(loader, "__dict__") for loader in given):
        raise TypeError("train_dataloaders must be loaders that can be read again, got an iterator: pass a DataLoader.")
    name = type(module).__name__
    if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
        raise MisconfigurationException(
            f"{trick} needs weights that exist, got lazy layers in {name}: run a batch through it first."
        )
    require_engine(trainer, trick, *TORCH)
    if launches_processes(trainer):
        raise MisconfigurationException(
            f"{trick} needs a Trainer that fits in this process, got a strategy that starts others (spawn, fork,"
            ' notebook): use strategy="ddp", or one device.'
        )
    if trainer.state.status == TrainerStatus.RUNNING:
        raise MisconfigurationException(f"{trick} runs a fit of its own: call it before trainer.fit, not inside.")


def is_trial(trainer: L.Trainer) -> bool:
    """Whether the present fit will be undone."""
    return bool(callbacks_of(trainer, UndoneFit))


class UndoneFit(Callback):
    """The callback of a fit without loggers, validation, checkpoints and schedules, which runs until it stops it.

    Of the Trainer's own callbacks, only those that change the network stay, since it would be another one without them.
    Everything is restored at the end, also after an exception or Ctrl-C.
    """

    def __init__(self) -> None:
        self.exception: BaseException | None = None
        self._kept = ObjectState()

    def fit(
        self, trainer: L.Trainer, module: Any, loaders: Any, datamodule: Any, beside: Sequence[Callback] = ()
    ) -> None:
        """Fit, and undo the fit.

        Args:
            trainer: The Trainer.
            module: The LightningModule, compiled or not.
            loaders: The training loaders, as for ``trainer.fit``.
            datamodule: The data module, as for ``trainer.fit``.
            beside: Further callbacks, which nobody else uses.
        """
        own = getattr(module, "_orig_mod", module)
        with _as_before(trainer, own, [loaders, datamodule], self._kept):
            # Wrapping sets an attribute, which is removed with the module's state.
            wrap_method(own, "configure_callbacks", lambda _: [])
            kept = [trick for trick in callbacks_of(trainer, Trick) if trick.changes_network]
            trainer.callbacks, trainer.profiler = [*kept, *beside, self], PassThroughProfiler()  # type: ignore[attr-defined]
            trainer.loggers = [DummyLogger() for _ in trainer.loggers]
            try:
                trainer.fit(module, loaders, datamodule=datamodule)
            except SystemExit:  # Lightning raises it after Ctrl-C
                if isinstance(self.exception, KeyboardInterrupt):
                    raise self.exception from None
                raise

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Not earlier: configure_optimizers makes its schedules for the training that will follow.
        self._kept.note(trainer.optimizers)
        fit_of(trainer).is_trial = True
        loop = trainer.fit_loop
        loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = None, -1, None, -1
        trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
        for config in trainer.lr_scheduler_configs:
            config.frequency = sys.maxsize  # the scheduler is never stepped, but a module may read it

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.exception = exception


@contextmanager
def _as_before(trainer: L.Trainer, module: L.LightningModule, data: list[Any], state: ObjectState) -> Iterator[None]:
    """Restore what a fit changes: module, Trainer, loaders, random numbers, and the handler of Ctrl-C."""
    state.note(
        [trainer, getattr(trainer.fit_loop, NAME, None), data], any_class=True, without=[trainer.strategy.launcher]
    )
    weights, interrupt, device = (
        TrainedModuleState(module, state),
        signal.getsignal(signal.SIGINT),
        trainer.strategy.root_device,
    )
    with ExitStack() as undo:
        if interrupt is not None and threading.current_thread() is threading.main_thread():
            undo.callback(signal.signal, signal.SIGINT, interrupt)
        undo.callback(state.restore)
        undo.callback(weights.restore)
        undo.enter_context(random_numbers_of(random_state(device), device))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        yield
        weights.refuse_counts()


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
        self._seen[id(value)] = value  # kept alive: the id of an object that is gone is given to another one
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
