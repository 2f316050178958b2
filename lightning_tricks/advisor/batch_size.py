"""The largest batch that fits into memory, and how many of them make the batch that is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.advisor.batch_trial import BatchTrial, require_trials
from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.trainer import callbacks_of
from lightning_tricks.schedules.undone_fit import require_undoable


def sizes_tried(fits: Callable[[int], tuple[bool, int]], start: int, most: float) -> dict[int, bool]:
    """Search the largest size that fits by doubling, then by bisection.

    Args:
        fits: Whether a size fits, and the largest size that there is data for; a larger one stands for that.
        start: The first size.
        most: The largest size worth trying.

    Returns:
        Whether each size that was tried fits, in their order.

    >>> sizes_tried(lambda size: (size <= 11, 100), start=2, most=64)
    {2: True, 4: True, 8: True, 16: False, 12: False, 10: True, 11: True}
    >>> sizes_tried(lambda size: (True, 6), start=2, most=64)
    {2: True, 4: True, 6: True}
    """
    tried: dict[int, bool] = {}
    low, high, size = 0, math.inf, min(start, most)
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
    start: int = 2,
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
        start: The first size to try, at least 1, which does not suit BatchNorm.
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
    for name, value in (("start", start), ("steps", steps), ("effective", effective), ("max_size", max_size)):
        if value is not None or name in ("start", "steps"):
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
    tried = sizes_tried(fits, start, min(share, max_size or math.inf))
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
