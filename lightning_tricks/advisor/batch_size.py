"""Finding the largest batch size that fits into memory, and the accumulation for an effective batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import garbage_collection_cuda
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_tricks.callbacks.sam import SAMCallback
from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.loaders import resizable, resize_batches, train_loader
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.steps import EpochPlan
from lightning_tricks.core.lightning.trainer import callbacks_of, extremes, grad_scaler
from lightning_tricks.core.out_of_memory import free_memory_of, out_of_memory
from lightning_tricks.core.replay.undone_fit import UndoneFit, require_undoable
from lightning_tricks.modules.sam.mixin import is_sam
from lightning_tricks.modules.sam.trainer_hooks import MixinHooks

__all__ = ["BatchSizeResult", "find_batch_size"]

_FITS, _OUT_OF_MEMORY, _FAILED = range(3)  # Outcomes of a trial, from the best to the worst.


def require_trials(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise if ranks would wait for one that runs out of memory, or if a callback sets the batch size."""
    strategy, devices = trainer.strategy, f"{trainer.world_size} devices, which wait for one that runs out of memory"
    if trainer.world_size > 1 and engine_of(trainer) is Engine.FSDP2:
        problem = f"{type(strategy).__name__} on {devices}: call it on one device"
    elif getattr(strategy, "is_apart", False):  # DDPPreset's
        problem = f"local SGD on {devices}: call it with another compression"
    elif trainer.world_size > 1 and not module.automatic_optimization:
        problem = f"{type(module).__name__}.automatic_optimization=False on {devices}: call it on one device"
    elif plans := callbacks_of(trainer, EpochPlan):  # type: ignore[type-abstract]
        problem = f"{type(plans[0]).__name__}, which sets the batch size: leave it out for find_batch_size"
    else:
        return
    raise MisconfigurationException(f"find_batch_size cannot work with {problem}.")


class BatchTrial(UndoneFit):
    """Tries one batch size; an instance is used once.

    No rank waits inside a step for another one that has run out of memory. Gradients are not averaged, which takes the
    same memory, and the ranks exchange the outcome after each batch and after an error.

    Args:
        size: The number of samples of a batch on each device, limited by the data.
        steps: The number of optimizer steps.
        accumulation: The number of batches per optimizer step.
        margin: The fraction of a CUDA device's memory to leave free, in [0, 1).
    """

    def __init__(self, size: int, *, steps: int, accumulation: int, margin: float) -> None:
        super().__init__()
        self._size, self._accumulation, self._margin = size, accumulation, margin
        self._batches_left = steps * accumulation
        self._available = 0  # Samples of the rank with the fewest.
        self._outcome = _FITS  # The worst of all ranks.
        self._has_begun = False

    def run(self, trainer: L.Trainer, module: Any, loaders: Any, datamodule: Any) -> tuple[bool, int]:
        """Try the size.

        Returns:
            Whether it fits on every rank, and the number of samples of the rank with the fewest.
        """
        # The second run of a SAM step takes memory, too.
        callbacks: list[Callback] = [copy(callback) for callback in callbacks_of(trainer, SAMCallback)]
        callbacks += [MixinHooks(module)] if is_sam(module) else []
        try:
            self.fit(trainer, module, loaders, datamodule, callbacks)
        except Exception:
            if self._outcome != _OUT_OF_MEMORY:
                raise
            self.exception = None  # Releases the tensors in its frames.
        if self._outcome == _OUT_OF_MEMORY:
            garbage_collection_cuda()
        return self._outcome == _FITS, self._available

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # UndoneFit restores all attributes of the strategy and the module, and with them these methods.
        wrap_method(trainer.strategy, "process_dataloader", lambda process, x: resizable(process(x), "find_batch_size"))
        wrap_method(pl_module, "log", lambda *_, **__: None)  # Logging may wait for other ranks.
        if trainer.world_size > 1:
            wrap_method(pl_module, "all_gather", _refuse_all_gather)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        trainer.limit_train_batches = 1.0
        trainer.reload_dataloaders_every_n_epochs = 0  # type: ignore[attr-defined]
        if pl_module.automatic_optimization:
            trainer.accumulate_grad_batches = self._accumulation
        scaler = grad_scaler(trainer)
        if scaler is not None:  # With the default of 65536 the first steps may be skipped and make no optimizer states.
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loaders = train_loader(trainer).flattened
        samples = sized_len(loaders[0].batch_sampler.sampler)
        if len(loaders) != 1 or samples is None:
            problem = f"{len(loaders)} loaders" if len(loaders) != 1 else "a sampler without a length"
            raise MisconfigurationException(f"find_batch_size needs one DataLoader of known length, got {problem}.")
        self._available, _ = extremes(trainer, samples)
        size = min(self._size, self._available)
        trainer.limit_train_batches = self._available // size  # Ends epochs on all ranks at the same batch.
        batches = loaders[0].batch_sampler
        batches.batch_size, batches.base, batches.drop_last = 0, 1, True  # Forces a resize, and full batches only.
        resize_batches(trainer, size)
        _disable_synchronization(trainer.strategy.model)
        if (device := trainer.strategy.root_device).type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._has_begun = True

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        over_margin = self._is_over_margin(trainer.strategy.root_device)
        self._share_outcome(trainer, _OUT_OF_MEMORY if over_margin else _FITS)
        if self._outcome != _FITS:
            raise RuntimeError("find_batch_size: another rank has failed, see its error.")
        self._batches_left -= 1
        trainer.should_stop = self._batches_left <= 0

    def _is_over_margin(self, device: torch.device) -> bool:
        if device.type != "cuda":
            return False
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device) > (1 - self._margin) * total

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if not self._has_begun or self._outcome != _FITS or not isinstance(exception, Exception):
            return
        outcome = _OUT_OF_MEMORY if out_of_memory(exception) else _FAILED
        if outcome == _OUT_OF_MEMORY:
            free_memory_of(exception)
        self._share_outcome(trainer, outcome)

    def _share_outcome(self, trainer: L.Trainer, outcome: int) -> None:
        """Set the outcome to the worst of all ranks."""
        _, self._outcome = extremes(trainer, outcome)


def _refuse_all_gather(*_: Any, **__: Any) -> None:
    raise MisconfigurationException(
        "find_batch_size cannot work with all_gather in training_step, where devices wait for one that runs out of"
        " memory: call it on one device."
    )


def _disable_synchronization(model: nn.Module | None) -> None:
    """Stop DDP and SyncBatchNorm from averaging gradients, buffers and statistics over the ranks."""
    if not isinstance(model, DistributedDataParallel):
        return
    model.require_backward_grad_sync = model.require_forward_param_sync = False
    model.static_graph = False  # With a static graph the first backward pass averages gradients anyway.
    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    if norms:
        own_group, _ = torch.distributed.new_subgroups(1)
        for norm in norms:
            norm.process_group = own_group


def search_sizes(fits: Callable[[int], tuple[bool, int]], initial: int, limit: float) -> dict[int, bool]:
    """Search for the largest size that fits, by doubling and then by bisection.

    Args:
        fits: A function that tries a size. It returns whether the size fits, and the number of samples in the data; a
            larger size is tried as this number.
        initial: The first size, at least 1.
        limit: The largest size to try.

    Returns:
        Whether each tried size fits, in the order of the trials.

    >>> search_sizes(lambda size: (size <= 11, 100), initial=2, limit=64)
    {2: True, 4: True, 8: True, 16: False, 12: False, 10: True, 11: True}
    >>> search_sizes(lambda size: (True, 6), initial=2, limit=64)
    {2: True, 4: True, 6: True}
    """
    tried: dict[int, bool] = {}
    low, high, size = 0, math.inf, min(initial, limit)
    while low < size < high:
        fit, available = fits(int(size))
        limit = min(limit, available)
        size = int(min(size, limit))
        tried[size] = fit
        low, high = (size, high) if fit else (low, size)
        size = min(2 * low, limit) if high == math.inf else (low + high) // 2
    return tried


def accumulation_for(effective: int, devices: int, largest: int) -> tuple[int, int]:
    """Choose batch size and accumulation with ``batch * devices * accumulation = effective``, or as near as possible.

    These are the fewest equal batches of at most ``largest`` samples. If that needs more than twice as many batches as
    the smallest possible number, it is the smallest number, with the nearest batch size.

    Args:
        effective: The number of samples of an optimizer step.
        devices: The number of devices that take a batch each.
        largest: The largest batch size on a device.

    >>> accumulation_for(1024, 4, largest=100)  # 3 batches of 85 would give 1020
    (64, 4)
    >>> accumulation_for(127, 1, largest=64)  # a prime number: gives 128
    (64, 2)
    """
    share = effective / devices
    fewest = math.ceil(share / largest)
    for accumulation in range(fewest, 2 * fewest + 1):
        if effective % (devices * accumulation) == 0:
            return effective // (devices * accumulation), accumulation
    return min(largest, max(1, round(share / fewest))), fewest


@dataclass(frozen=True)
class BatchSizeResult:
    """The result of ``find_batch_size``.

    Args:
        batch_size: The number of samples of a batch on each device.
        accumulate_grad_batches: The number of batches of an optimizer step.
        devices: The number of devices that take a batch each.
        tried: Whether each tried size fits, in the order of the trials.

    Example:
        >>> result = BatchSizeResult(batch_size=48, accumulate_grad_batches=2, devices=4, tried={32: True, 64: False})
        >>> result.effective
        384
    """

    batch_size: int
    accumulate_grad_batches: int
    devices: int
    tried: dict[int, bool]

    @property
    def effective(self) -> int:
        """The number of samples of an optimizer step: ``batch_size * devices * accumulate_grad_batches``."""
        return self.batch_size * self.devices * self.accumulate_grad_batches


def find_batch_size(
    trainer: L.Trainer,
    module: L.LightningModule,
    train_dataloaders: Any = None,
    datamodule: L.LightningDataModule | None = None,
    *,
    effective: int | None = None,
    margin: float = 0.1,
    initial: int = 2,
    max_size: int | None = None,
    steps: int = 3,
) -> BatchSizeResult:
    """Find the largest batch size with which training does not run out of memory, and the accumulation for it.

    Sizes are doubled and then bisected. Each one is tried in a fit of a few real training steps (transfer, forward,
    backward, optimizer) with the Trainer's own strategy and precision, but without callbacks, loggers and validation.
    On several devices a size fits if it fits on all of them. On CUDA it fits if at most ``(1 - margin) * total memory``
    is allocated at the peak; elsewhere, if memory ran out, the largest size is multiplied by ``1 - margin``.

    Afterwards everything is bit for bit as before, as after ``find_lr``, with two exceptions. With ``effective``,
    ``trainer.accumulate_grad_batches`` is set. Without ``train_dataloaders``, the ``batch_size`` of the data module (or
    of the module, if there is none) is set, as attribute and as hyperparameter, if it has one. Otherwise write
    ``DataLoader(dataset, batch_size=result.batch_size)``.

    The trials use the first full batches of an epoch. If samples differ in size (texts), start with the longest. Leave
    a margin for the memory of callbacks: the averages of EMA are another copy of the weights.

    Args:
        trainer: The Trainer that will fit.
        module: The module.
        train_dataloaders: One DataLoader, as for ``trainer.fit``; its batch size does not matter.
        datamodule: The data module, as for ``trainer.fit``.
        effective: The number of samples of an optimizer step, over all devices and accumulated batches. If no batch
            size gives exactly this number, the nearest one is used: see ``result.effective``.
        margin: The fraction of the memory to leave free, in [0, 1).
        initial: The first size to try, at least 1; BatchNorm needs at least 2.
        max_size: The largest size to try; the size of the data set is a limit, too. Required on a CPU, where the system
            may kill a process that takes too much memory.
        steps: The number of optimizer steps of a trial, at least 2: the first one makes the optimizer states.

    Returns:
        Batch size and accumulation, and the tried sizes.

    Raises:
        TypeError: If a value has the wrong type, or the loaders can be read only once.
        ValueError: If a value is out of range.
        MisconfigurationException: If not even one sample fits; if batches cannot be resized; for lazy layers; for
            callbacks that set the accumulation; if it is called inside a fit; under strategies that shard the model
            (FSDP, DeepSpeed), spawn or fork; and on several devices, for manual optimization or an ``all_gather`` in
            ``training_step``.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(
        ...     accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
        ...     enable_model_summary=False,
        ... )
        >>> result = find_batch_size(trainer, BoringModel(), max_size=16, effective=64)
        >>> result.batch_size, trainer.accumulate_grad_batches
        (16, 4)
    """
    check_range("margin", margin, 0.0, 1.0, below=True)
    check_count("initial", initial)
    check_count("steps", steps)
    check_count("effective", effective, optional=True)
    check_count("max_size", max_size, optional=True)
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}: the first one makes the optimizer states.")
    require_undoable(trainer, module, train_dataloaders, "find_batch_size")
    require_trials(trainer, module)
    _require_effective(trainer, module, effective)
    device = trainer.strategy.root_device
    if max_size is None and device.type == "cpu":
        raise ValueError("max_size must be given on a CPU: the system may kill a process that takes too much memory.")
    accumulates = effective is not None or initial_accumulation(trainer) > 1

    def fits(size: int) -> tuple[bool, int]:
        trial = BatchTrial(size, steps=steps, accumulation=2 if accumulates else 1, margin=margin)
        return trial.run(trainer, module, train_dataloaders, datamodule)

    share = math.inf if effective is None else math.ceil(effective / trainer.world_size)
    tried = search_sizes(fits, initial, min(share, max_size or math.inf))
    largest = max((size for size, fit in tried.items() if fit), default=0)
    if 0 in tried:
        raise MisconfigurationException("find_batch_size needs samples to train on, got none on one of the devices.")
    if not largest:
        raise MisconfigurationException(
            f"find_batch_size found that one sample does not fit into the memory of {device} with {margin:.0%} of it"
            " left free. See suggest_strategy, or use a smaller model."
        )
    if device.type != "cuda" and not all(tried.values()):
        largest = max(1, math.floor(largest * (1 - margin)))
    batch_size, accumulation = largest, initial_accumulation(trainer)
    if effective is not None:
        batch_size, accumulation = accumulation_for(effective, trainer.world_size, largest)
        trainer.accumulate_grad_batches = accumulation
    if train_dataloaders is None:
        _set_batch_size(getattr(module, "_orig_mod", module) if datamodule is None else datamodule, batch_size)
    return BatchSizeResult(batch_size, accumulation, trainer.world_size, tried)


def initial_accumulation(trainer: L.Trainer) -> int:
    """The number of batches of an optimizer step at the beginning of the Trainer's fit."""
    schedulers = callbacks_of(trainer, GradientAccumulationScheduler)
    return schedulers[-1].get_accumulate_grad_batches(0) if schedulers else trainer.accumulate_grad_batches


def _require_effective(trainer: L.Trainer, module: L.LightningModule, effective: int | None) -> None:
    if effective is None:
        return
    if effective < trainer.world_size:
        raise ValueError(
            f"effective must be at least {trainer.world_size}, one per device, got {effective}: use fewer devices."
        )
    if callbacks_of(trainer, GradientAccumulationScheduler):
        problem = "GradientAccumulationScheduler, which sets the accumulation, too: leave one out"
    elif not module.automatic_optimization:
        problem = f"{type(module).__name__}.automatic_optimization=False: leave effective= out"
    else:
        return
    raise MisconfigurationException(f"find_batch_size(effective={effective}) cannot work with {problem}.")


def _set_batch_size(owner: Any, size: int) -> None:
    if hasattr(owner, "batch_size"):
        owner.batch_size = size
    if "batch_size" in owner.hparams:
        owner.hparams["batch_size"] = size
