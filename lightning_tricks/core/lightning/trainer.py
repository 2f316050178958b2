"""Facts about a Trainer, some of which only private names tell; those about loaders are in loaders.py."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_tricks.core.call_stack import locals_of
from lightning_tricks.core.device import fetched, reached
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.random_numbers import random_state, set_random_state

Kind = TypeVar("Kind")


def is_fitting(trainer: L.Trainer) -> bool:
    """Whether ``trainer.fit`` runs, its validation included."""
    return trainer.state.fn == TrainerFn.FITTING


def trainer_of(module: L.LightningModule | None) -> L.Trainer | None:
    """The Trainer that a module is in, if it is in one."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:
        return None


def callbacks_of(trainer: L.Trainer, kind: type[Kind]) -> list[Kind]:
    """The Trainer's callbacks of a kind, in their order."""
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def optimizer_number(trainer: L.Trainer, optimizer: Optimizer) -> int:
    """The position of an optimizer in ``trainer.optimizers``."""
    return next(number for number, other in enumerate(trainer.optimizers) if other is optimizer)


def launches_processes(trainer: L.Trainer) -> bool:
    """Whether a fit runs in other processes that this one starts (spawn, fork, notebook)."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def data_parallel(trainer: L.Trainer) -> tuple[int, int]:
    """The rank of this process among those that train on different samples, and their number."""
    ranks = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return ranks["rank"], ranks["num_replicas"]


def saves_folder(trainer: L.Trainer) -> bool:
    """Whether a checkpoint is a folder to which every rank writes its shards."""
    strategy = trainer.strategy
    return engine_of(trainer).is_deepspeed or bool(getattr(strategy, "_save_distributed_checkpoint", False))


class FolderParts:
    """A strategy that writes the parts of callbacks into a checkpoint folder before the folder gets its name.

    All ranks call a part, which gives this rank's tensors by names, by the names of folders inside the checkpoint's.
    """

    __slots__ = ()  # strategies have instance dictionaries of their own
    parts: tuple[Callable[[], dict[str, dict[str, torch.Tensor]]], ...] = ()


def step_schedules(trainer: L.Trainer, optimizer: Optimizer) -> None:
    """Step the schedulers of an optimizer that has just stepped, as automatic optimization would."""
    now = {"step": trainer.fit_loop.batch_idx + 1, "epoch": trainer.current_epoch + 1}
    for config in trainer.lr_scheduler_configs:
        due = now[config.interval] % config.frequency == 0 and (config.interval == "step" or trainer.is_last_batch)
        if config.scheduler.optimizer is optimizer and due and not isinstance(config.scheduler, ReduceLROnPlateau):
            trainer.lightning_module.lr_scheduler_step(config.scheduler, None)


def will_step(trainer: L.Trainer) -> bool:
    """Whether the optimizer steps after the present batch, or gradients are accumulated further."""
    return not trainer.fit_loop._should_accumulate()


def grad_scaler(trainer: L.Trainer) -> torch.amp.GradScaler | None:
    """The GradScaler of fp16, if there is one."""
    return getattr(trainer.precision_plugin, "scaler", None)


def scaled(trainer: L.Trainer, loss: torch.Tensor) -> torch.Tensor:
    """A loss divided and scaled as Lightning divides and scales that of a training step."""
    if trainer.lightning_module.automatic_optimization:
        loss = loss / trainer.accumulate_grad_batches
    scaler = grad_scaler(trainer)
    return loss if scaler is None else scaler.scale(loss)


def unsynced(trainer: L.Trainer) -> AbstractContextManager[None]:
    """A context in which DDP does not average gradients over the ranks."""
    return getattr(trainer.strategy, "block_backward_sync", nullcontext)()


def subtract_steps(trainer: L.Trainer, steps: int) -> None:
    """Subtract optimizer steps that were left out from ``global_step``, which has no public setter."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    for tracker in (progress.total, progress.current):
        tracker.ready -= steps
        tracker.completed -= steps


def heed_sigterm(trainer: L.Trainer) -> None:
    """End a program of several runs after a SIGTERM amid the last batch of a loop, which Lightning notes and forgets.

    Raises:
        SIGTERMException: With exit status 143.
    """
    if trainer.received_sigterm:
        raise SIGTERMException(128 + signal.SIGTERM)


def is_last_step(trainer: L.Trainer) -> bool:
    """Whether the optimizer step just made is the last that is planned."""
    last_epoch = trainer.is_last_batch and 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1
    return last_epoch or 0 < trainer.max_steps <= trainer.global_step


def monitors(trainer: L.Trainer, filepath: str) -> str | None:
    """The metric that the ModelCheckpoint which saves a file monitors; None if none saves it."""
    for callback in callbacks_of(trainer, ModelCheckpoint):
        if filepath in {*callback.best_k_models, callback.last_model_path}:
            return callback.monitor
    return None


def validate_again(trainer: L.Trainer, run: Callable[[], Any], suffix: str) -> set[str]:
    """Run the fit's validation loop with the module's hooks only, and log with a suffix; returns the logged names.

    No hooks of callbacks run: a ModelCheckpoint or an EarlyStopping would take it for a second validation. Random
    numbers and progress are restored.
    """
    loop, names = trainer.fit_loop.epoch_loop.val_loop, set()
    progress, restarting = loop.batch_progress.state_dict(), loop.restarting

    def renamed(log: Callable[..., None], name: str, *args: Any, **kwargs: Any) -> None:
        names.add(name + suffix)
        log(name + suffix, *args, **kwargs)

    device = trainer.strategy.root_device
    with ExitStack() as undo:
        undo.callback(set_random_state, random_state(device), device)
        undo.callback(wrap_method(trainer.lightning_module, "log", renamed))
        for callback in callbacks_of(trainer, Callback):
            for hook in [hook for hook in dir(Callback) if hook.startswith("on_validation")]:
                undo.callback(wrap_method(callback, hook, _silent))
        undo.callback(loop.batch_progress.load_state_dict, progress)
        undo.callback(setattr, loop, "restarting", restarting)
        loop.restarting = False
        run()
    return names


def _silent(*_: Any, **__: Any) -> None:
    pass


def stepped_batches(trainer: L.Trainer) -> int:
    """The number of batches so far that an optimizer step has followed, by which Lightning counts what it logs."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_every_n_steps(trainer: L.Trainer, values: Callable[[], Mapping[str, float | torch.Tensor]]) -> None:
    """Log metrics every ``log_every_n_steps``, as LearningRateMonitor does, also without a logger."""
    # The Trainer's own should_update_logs takes five times longer.
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if every and ((stepped_batches(trainer) + 1) % every == 0 or trainer.should_stop):
        log_metrics(trainer, values())


def log_metrics(trainer: L.Trainer, values: Mapping[str, float | torch.Tensor]) -> None:
    """Log metrics now, also without a logger; what a logger gets of scalars on the device comes in one transfer."""
    if trainer.loggers:
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        numbers = dict(zip(tensors, fetched([*tensors.values()]), strict=True))
        values = {name: float(numbers.get(name, value)) for name, value in values.items()}
    for logger in trainer.loggers:
        logger.log_metrics(values, step=stepped_batches(trainer))  # type: ignore[arg-type]
    trainer.callback_metrics.update({name: torch.as_tensor(value) for name, value in values.items()})


def transfers_batch(trainer: L.Trainer) -> bool:
    """Whether a loop moves its batch to the device now; other code may call the strategy's method, too."""
    return trainer.lightning_module._current_fx_name == "batch_to_device"


def has_static_graph(trainer: L.Trainer) -> bool:
    """Whether DDP was given ``static_graph=True``."""
    strategy: Any = trainer.strategy
    return engine_of(trainer) is Engine.DDP and bool(strategy._ddp_kwargs.get("static_graph"))


def detects_anomaly(trainer: L.Trainer) -> bool:
    """Whether the backward pass raises at a NaN, ``Trainer(detect_anomaly=True)``."""
    return trainer._detect_anomaly


def keep_user_samplers(trainer: L.Trainer) -> None:
    """Leave the loaders their own samplers, as ``Trainer(use_distributed_sampler=False)``.

    No public name sets it later, when a DDP strategy has found that it runs alone; a DistributedSampler shuffles.
    """
    trainer._accelerator_connector.use_distributed_sampler = False


def has_comm_state(trainer: L.Trainer) -> bool:
    """Whether DDP was given a communication hook with a state."""
    strategy: Any = trainer.strategy
    ours = getattr(strategy, "compression", "none") in ("powersgd", "local_sgd")  # arguments of DDPPreset
    return engine_of(trainer) is Engine.DDP and (ours or strategy._ddp_comm_state is not None)


def requested_precision() -> str | None:
    """The precision that the user asked of the Trainer being constructed, spelled out; None if none was.

    A strategy is handed the same plugin for "no precision given" and "precision='32-true' given", and neither the
    Trainer nor its connector keeps the argument. It is read off the connector's constructor, which is on the stack
    while a strategy is set up, as is a plugin from ``plugins=``.
    """
    constructor = locals_of(_AcceleratorConnector.__init__)
    if constructor is None:
        return None
    plugin = constructor["self"]._precision_plugin_flag
    asked = _convert_precision_to_unified_args(constructor["precision"])
    return asked or (None if plugin is None else plugin.precision)


def extremes(trainer: L.Trainer, number: int) -> tuple[int, int]:
    """The smallest and the largest of the ranks' numbers; all ranks take part, and wait for their devices."""
    return later_extremes(trainer, number)()


def later_extremes(trainer: L.Trainer, number: int) -> Callable[[], tuple[int, int]]:
    """Begin to find the smallest and the largest of the ranks' numbers, which the result gives when it is called.

    All ranks take part now. None waits for its device before the result is called, and then only if the device is
    still busy with what it was given before this call. (``strategy.reduce`` would wait for the devices of all ranks.)
    """
    if trainer.world_size == 1:
        return lambda: (number, number)
    device = trainer.strategy.root_device
    both = torch.full((2,), number, device=device)
    both[1].neg_()
    dist.all_reduce(both, dist.ReduceOp.MAX)
    found, wait = both.to("cpu", non_blocking=True), reached(device)

    def values() -> tuple[int, int]:
        wait()
        largest, negated_smallest = found.tolist()
        return -negated_smallest, largest

    return values


def step_arguments(pl_module: L.LightningModule, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """The arguments of ``training_step`` as Lightning makes them."""
    indexed = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
    return (batch, batch_idx) if indexed else (batch,)


def takes_dataloader_iter(pl_module: L.LightningModule) -> bool:
    """Whether ``training_step`` takes its batches out of an iterator itself."""
    return "dataloader_iter" in inspect.signature(pl_module.training_step).parameters
