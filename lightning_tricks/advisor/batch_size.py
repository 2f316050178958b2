"""The largest batch that fits into memory, and how many of them make the batch that is wanted."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.loaders import resizable, resize_batches, train_loader
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.steps import EpochPlan
from lightning_tricks.core.lightning.trainer import callbacks_of, extremes, grad_scaler
from lightning_tricks.core.replay.undone_fit import UndoneFit, require_undoable
from lightning_tricks.modules.sam.mixin import is_sam
from lightning_tricks.modules.sam.trainer_hooks import SAMHooks

__all__ = ["BatchSizeResult", "find_batch_size"]

_FITS, _FULL, _FAILED = range(3)  # what a rank tells the others
_SIGNS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is used up: of a device, of the host, of cuDNN or of cuBLAS.

    >>> out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or is_oom_error(error):
        return True
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in _SIGNS)


def require_trials(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if ranks would wait for one that runs out of memory, or a callback sizes the batches."""
    strategy = trainer.strategy
    if trainer.world_size > 1 and engine_of(trainer) is Engine.FSDP2:
        found = f"{type(strategy).__name__} on {trainer.world_size} devices, which wait for one that runs out of memory"
    elif trainer.world_size > 1 and getattr(strategy, "compression", None) == "local_sgd":
        found = "local SGD, whose devices wait for one that runs out of memory: find it with another compression"
    elif trainer.world_size > 1 and not module.automatic_optimization:
        found = (
            f"{type(module).__name__}.automatic_optimization=False on {trainer.world_size} devices, which wait for one"
            " that runs out of memory: find it on one device"
        )
    elif plans := [each for each in callbacks_of(trainer, Callback) if isinstance(each, EpochPlan)]:
        found = f"{type(plans[0]).__name__}, which sizes the batches: find it without"
    else:
        return
    raise MisconfigurationException(f"find_batch_size cannot work with {found}.")


class BatchTrial(UndoneFit):
    """Tries one batch size; to be used once.

    No rank waits inside a step for another that has run out of memory: gradients are not averaged, which takes no less
    memory, and after each batch, and after an error, the ranks tell each other how it went.

    Args:
        size: Samples of a batch on each device; all that there are if it is more.
        steps: Optimizer steps.
        accumulation: Batches of each.
        margin: Share of a CUDA device's memory to leave free.
    """

    def __init__(self, size: int, *, steps: int, accumulation: int, margin: float) -> None:
        super().__init__()
        self._size, self._accumulation, self._margin = size, accumulation, margin
        self._left = steps * accumulation  # batches
        self._available = 0  # samples
        self._verdict = _FITS
        self._begun = False

    def run(self, trainer: pl.Trainer, module: Any, loaders: Any, datamodule: Any) -> tuple[bool, int]:
        """Whether the size fits on every rank, and the samples that the rank with the fewest has."""
        beside = [SAMHooks(module)] if is_sam(module) else []  # the second run of a step takes memory, too
        try:
            self.fit(trainer, module, loaders, datamodule, beside)
        except Exception:
            if self._verdict != _FULL:
                raise
            self.exception = None  # with it go the tensors of its frames
        if self._verdict == _FULL:
            garbage_collection_cuda()
        return self._verdict == _FITS, self._available

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # undone with what the strategy and the module are
        wrap_method(trainer.strategy, "process_dataloader", _resizable)
        wrap_method(pl_module, "log", lambda *_, **__: None)  # which may wait for other ranks
        if trainer.world_size > 1:
            wrap_method(pl_module, "all_gather", _refuse_all_gather)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        trainer.limit_train_batches = 1.0
        trainer.reload_dataloaders_every_n_epochs = 0  # type: ignore[attr-defined]
        if pl_module.automatic_optimization:
            trainer.accumulate_grad_batches = self._accumulation
        scaler = grad_scaler(trainer)
        if scaler is not None:  # from 65536 it skips the first steps, which then make no optimizer states
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaders = train_loader(trainer).flattened
        samples = sized_len(loaders[0].batch_sampler.sampler)
        if len(loaders) != 1 or samples is None:
            found = f"{len(loaders)} loaders" if len(loaders) != 1 else "a sampler without a length"
            raise MisconfigurationException(f"find_batch_size sizes the batches of one DataLoader, got {found}.")
        self._available, _ = extremes(trainer, samples)
        size = min(self._size, self._available)
        trainer.limit_train_batches = self._available // size  # epochs that end at once on all ranks
        batches = loaders[0].batch_sampler
        batches.batch_size, batches.base, batches.drop_last = 0, 1, True  # to be sized anew; full batches only
        resize_batches(trainer, size)
        _let_ranks_be(trainer.strategy.model)
        if (device := trainer.strategy.root_device).type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._begun = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tell(trainer, _FULL if self._over_margin(trainer.strategy.root_device) else _FITS)
        if self._verdict != _FITS:
            raise RuntimeError("find_batch_size: another rank has failed, see its error.")
        self._left -= 1
        trainer.should_stop = self._left <= 0

    def _over_margin(self, device: torch.device) -> bool:
        if device.type != "cuda":
            return False
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device) > (1 - self._margin) * total

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if not self._begun or self._verdict != _FITS or not isinstance(exception, Exception):
            return
        full = out_of_memory(exception)
        if full:
            traceback.clear_frames(exception.__traceback__)  # which hold the batch and its activations
            garbage_collection_cuda()
        self._tell(trainer, _FULL if full else _FAILED)

    def _tell(self, trainer: pl.Trainer, state: int) -> None:
        _, self._verdict = extremes(trainer, state)


def _resizable(process: Callable[[Any], Any], loader: Any) -> DataLoader[Any]:
    return resizable(process(loader), "find_batch_size")


def _refuse_all_gather(*_: Any, **__: Any) -> None:
    raise MisconfigurationException(
        "find_batch_size cannot work with all_gather in training_step, at which devices wait for one that runs out of"
        " memory: find it on one device."
    )


def _let_ranks_be(model: nn.Module | None) -> None:
    """Average neither gradients nor buffers, nor the statistics of SyncBatchNorm, over the ranks."""
    if not isinstance(model, DistributedDataParallel):
        return
    model.require_backward_grad_sync = model.require_forward_param_sync = False
    model.static_graph = False  # whose first backward averages gradients in any case
    norms = [each for each in model.modules() if isinstance(each, nn.SyncBatchNorm)]
    if norms:
        alone, _ = torch.distributed.new_subgroups(1)
        for norm in norms:
            norm.process_group = alone


def sizes_tried(fits: Callable[[int], tuple[bool, int]], initial: int, most: float) -> dict[int, bool]:
    """Search the largest size that fits by doubling, then by bisection.

    Args:
        fits: Whether a size fits, and the largest size that there is data for; a larger one stands for that.
        initial: The first size.
        most: The largest size worth trying.

    Returns:
        Whether each size that was tried fits, in their order.

    >>> sizes_tried(lambda size: (size <= 11, 100), initial=2, most=64)
    {2: True, 4: True, 8: True, 16: False, 12: False, 10: True, 11: True}
    >>> sizes_tried(lambda size: (True, 6), initial=2, most=64)
    {2: True, 4: True, 6: True}
    """
    tried: dict[int, bool] = {}
    low, high, size = 0, math.inf, min(initial, most)
    while low < size < high:
        fit, available = fits(int(size))
        most = min(most, available)
        size = int(min(size, most))
        tried[size] = fit
        low, high = (size, high) if fit else (low, size)
        size = min(2 * low, most) if high == math.inf else (low + high) // 2
    return tried


def accumulation_for(effective: int, devices: int, largest: int) -> tuple[int, int]:
    """Batch size and accumulation with ``batch * devices * accumulation = effective``, or as near as can be.

    The fewest batches that are equal and not above ``largest``; if there are none with at most twice as many batches as
    needed, then as few as can be, of the nearest size.

    >>> accumulation_for(1024, 4, largest=100)  # of 64: 3 batches of 85 would be 1020
    (64, 4)
    >>> accumulation_for(127, 1, largest=64)  # a prime: 128
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
    """What ``find_batch_size`` has found.

    Args:
        batch_size: Samples of a batch on each device.
        accumulate_grad_batches: Batches of an optimizer step.
        devices: Devices that take a batch each.
        tried: Whether each size that was tried fits, in the order of the trials.

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
        """Samples of an optimizer step: ``batch_size * devices * accumulate_grad_batches``."""
        return self.batch_size * self.devices * self.accumulate_grad_batches


def find_batch_size(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    train_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    effective: int | None = None,
    margin: float = 0.1,
    initial: int = 2,
    max_size: int | None = None,
    steps: int = 3,
) -> BatchSizeResult:
    """Find the largest batch size with which training does not run out of memory, and the accumulation to go with it.

    Each size, doubled and then bisected, is tried in a fit of a few real training steps (transfer, forward, backward,
    optimizer) by the Trainer's own strategy and precision, with nothing else: no callbacks, loggers or validation.
    On several devices a size fits if it fits on all of them. On CUDA it fits if the most that is allocated is at most
    ``(1 - margin) * total memory``; elsewhere, if memory ran out, the largest size is made that much smaller.

    Afterwards everything is bit for bit as before, as after ``find_lr``; except that, with ``effective``,
    ``trainer.accumulate_grad_batches`` is set, and without ``train_dataloaders`` the ``batch_size`` of the data module
    (or of the module, if there is none), as attribute and as hyperparameter, where it has one. Otherwise write
    ``DataLoader(dataset, batch_size=result.batch_size)``.

    What is tried are the first full batches of an epoch: where samples differ in size (texts), begin with the longest.
    Leave a margin for what callbacks hold: the averages of EMA are one more copy of the weights.

    Args:
        trainer: The Trainer that is to fit.
        module: The module.
        train_dataloaders: As for ``trainer.fit``, one DataLoader; its batch size does not matter.
        datamodule: As for ``trainer.fit``.
        effective: Samples of an optimizer step, over all devices and accumulated batches. If no batch size gives
            exactly that, the nearest is taken: see ``result.effective``.
        margin: Share of the memory to leave free, in [0, 1).
        initial: The first size to try, at least 1, which does not suit BatchNorm.
        max_size: The largest size to try; the data set is a limit too. Must be given on a CPU, where the system may
            kill a process that takes too much instead of refusing memory.
        steps: Optimizer steps of a trial, at least 2: the states of the optimizer come into being in the first.

    Returns:
        Batch size and accumulation, and which sizes were tried.

    Raises:
        TypeError: For a value of the wrong type, or loaders that can be read only once.
        ValueError: For a value out of range.
        MisconfigurationException: If not even one sample fits; for loaders whose batches cannot be resized, lazy
            layers, callbacks that decide on accumulation, inside of a fit, and under strategies that share a model
            among devices (FSDP, DeepSpeed), spawn or fork; on several devices, for manual optimization, and for an
            ``all_gather`` in ``training_step``.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = pl.Trainer(
        ...     accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
        ...     enable_model_summary=False,
        ... )
        >>> result = find_batch_size(trainer, BoringModel(), max_size=16, effective=64)
        >>> result.batch_size, trainer.accumulate_grad_batches
        (16, 4)
    """
    check_range("margin", margin, 0.0, 1.0, below=True)
    for name, value in (("initial", initial), ("steps", steps), ("effective", effective), ("max_size", max_size)):
        if value is not None or name in ("initial", "steps"):
            check_count(name, value)  # type: ignore[arg-type]
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}: optimizer states come into being in the first.")
    require_undoable(trainer, module, train_dataloaders, "find_batch_size")
    require_trials(trainer, module)
    _require_effective(trainer, module, effective)
    device = trainer.strategy.root_device
    if max_size is None and device.type == "cpu":
        raise ValueError("max_size must be given on a CPU, which may kill a process that takes too much memory.")
    accumulates = effective is not None or accumulation_of(trainer) > 1

    def fits(size: int) -> tuple[bool, int]:
        trial = BatchTrial(size, steps=steps, accumulation=2 if accumulates else 1, margin=margin)
        return trial.run(trainer, module, train_dataloaders, datamodule)

    share = math.inf if effective is None else math.ceil(effective / trainer.world_size)
    tried = sizes_tried(fits, initial, min(share, max_size or math.inf))
    largest = max((size for size, fit in tried.items() if fit), default=0)
    if 0 in tried:
        raise MisconfigurationException("find_batch_size needs samples to train on, and a device has none.")
    if not largest:
        raise MisconfigurationException(
            f"find_batch_size found that one sample does not fit into the memory of {device}, {margin:.0%} of it left"
            " free. See suggest_strategy, or use a smaller model."
        )
    if device.type != "cuda" and not all(tried.values()):
        largest = max(1, math.floor(largest * (1 - margin)))
    batch_size, accumulation = largest, accumulation_of(trainer)
    if effective is not None:
        batch_size, accumulation = accumulation_for(effective, trainer.world_size, largest)
        trainer.accumulate_grad_batches = accumulation
    if train_dataloaders is None:
        _set_batch_size(getattr(module, "_orig_mod", module) if datamodule is None else datamodule, batch_size)
    return BatchSizeResult(batch_size, accumulation, trainer.world_size, tried)


def accumulation_of(trainer: pl.Trainer) -> int:
    """The batches of an optimizer step with which the Trainer's fit begins."""
    schedulers = callbacks_of(trainer, GradientAccumulationScheduler)
    return schedulers[-1].get_accumulate_grad_batches(0) if schedulers else trainer.accumulate_grad_batches


def _require_effective(trainer: pl.Trainer, module: pl.LightningModule, effective: int | None) -> None:
    if effective is None:
        return
    if effective < trainer.world_size:
        raise ValueError(
            f"effective must be at least {trainer.world_size}, one a device, got {effective}: use fewer devices."
        )
    if callbacks_of(trainer, GradientAccumulationScheduler):
        found = "GradientAccumulationScheduler, which sets the accumulation, too: leave that out"
    elif not module.automatic_optimization:
        found = f"{type(module).__name__}.automatic_optimization=False, in which training_step accumulates"
    else:
        return
    raise MisconfigurationException(f"find_batch_size(effective={effective}) cannot work with {found}, or effective.")


def _set_batch_size(owner: Any, size: int) -> None:
    if hasattr(owner, "batch_size"):
        owner.batch_size = size
    if "batch_size" in owner.hparams:
        owner.hparams["batch_size"] = size
