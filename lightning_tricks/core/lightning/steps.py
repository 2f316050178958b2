"""The number of optimizer steps of a fit."""

from __future__ import annotations

import math
from abc import abstractmethod

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.checks import duration_steps
from lightning_tricks.core.lightning.loaders import train_batches_of_sizes
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.trainer import callbacks_of

__all__ = ["UnknownTotalSteps", "optimizer_steps"]


class UnknownTotalSteps(ValueError):
    """The number of optimizer steps cannot be known before training; the message says why and what to pass.

    Example:
        >>> raise UnknownTotalSteps("the training loader has no length")
        Traceback (most recent call last):
        lightning_tricks.core.lightning.steps.UnknownTotalSteps: the training loader has no length; pass total_steps=...
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; pass total_steps=...")
        self.reason = reason


class EpochPlan(Callback):
    """A callback that changes accumulation or batch size between epochs, and tells ``optimizer_steps`` so."""

    @abstractmethod
    def step_of(self, trainer: pl.Trainer, epoch: int) -> tuple[int, int]:
        """The number of batches per optimizer step in an epoch, and the multiple of the loader's batch size."""


def optimizer_steps(trainer: pl.Trainer) -> int:
    """The exact number of optimizer steps of this fit, first epoch to last, including those before a resume.

    ``min(max_steps, sum_e ceil(B_e / a_e))`` with ``B_e`` training batches and accumulation ``a_e`` in epoch e. Counts
    limits, distributed samplers and ragged windows; reads nothing from the loaders, starts no workers and leaves the
    random generators as they were (a ``train_dataloader`` hook is called once more). What ends training early, such as
    EarlyStopping, is not foreseen. The count is the planned one: Lightning itself loses steps in two resumes, with
    ``max_steps`` from the checkpoint of an epoch's end, and with GradientAccumulationScheduler in mid-epoch. To be
    called from ``configure_optimizers`` or later.

    Args:
        trainer: The Trainer, attached to a module and its data.

    Returns:
        The total, at least 1, the same on every rank and after a resume.

    Raises:
        UnknownTotalSteps: If the loaders have no trustworthy length, or neither a number of epochs nor of
            steps ends training.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Net(BoringModel):
        ...     def configure_optimizers(self):
        ...         print(optimizer_steps(self.trainer))
        ...         return super().configure_optimizers()
        >>> trainer = pl.Trainer(
        ...     max_epochs=2, limit_train_batches=5, accumulate_grad_batches=2, limit_val_batches=0, accelerator="cpu",
        ...     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(Net())
        6
    """
    require_same_lightning(trainer, "optimizer_steps")
    _refuse_what_cannot_be_counted(trainer)
    epochs = _epochs(trainer)
    if trainer.max_epochs == -1:
        if trainer.max_steps == -1:
            raise UnknownTotalSteps("max_epochs=-1 and max_steps=-1 let training run forever")
        steps = trainer.max_steps if trainer.limit_train_batches else 0
    elif trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        raise UnknownTotalSteps(
            f"{_loader_name(trainer)} is reloaded and can change its length, by reload_dataloaders_every_n_epochs="
            f"{trainer.reload_dataloaders_every_n_epochs}"  # type: ignore[attr-defined]
        )
    elif (batches := train_batches_of_sizes(trainer, {size for _, size in epochs})) is None:
        raise UnknownTotalSteps(
            f"{_loader_name(trainer)} has no length that can be relied on (none attached yet, an IterableDataset, or a"
            " length that differs between ranks)"
        )
    else:
        steps = sum(math.ceil(batches[size] / factor) for factor, size in epochs)  # a ragged window is a step
        steps = steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
    if steps < 1:
        raise UnknownTotalSteps(
            f"there is no optimizer step to count with max_epochs={trainer.max_epochs},"
            f" max_steps={trainer.max_steps}, limit_train_batches={trainer.limit_train_batches}"
        )
    return steps


def _loader_name(trainer: pl.Trainer) -> str:
    """The training loader with the class that it is of, or that makes it."""
    source = trainer.fit_loop._data_source.instance
    return "the training loader" + ("" if source is None else f" of {type(source).__name__}")


def steps_of(trainer: pl.Trainer, duration: int | float, trick: str, name: str) -> float:
    """The optimizer steps of a duration (int steps, or float fraction of training), not rounded.

    Raises:
        MisconfigurationException: For a fraction of a training whose length is unknown.
    """
    if isinstance(duration, int) or duration == 0:
        return duration
    try:
        return duration_steps(duration, optimizer_steps(trainer))
    except UnknownTotalSteps as error:
        raise MisconfigurationException(
            f"{trick}({name}={duration}) is a fraction of a training whose length is unknown: {error.reason}. Give"
            f" {name} in optimizer steps (an int)."
        ) from error


def _refuse_what_cannot_be_counted(trainer: pl.Trainer) -> None:
    if trainer.lightning_module is None:
        raise UnknownTotalSteps("the Trainer has no module and data yet (ask in configure_optimizers or later)")
    if not trainer.lightning_module.automatic_optimization:
        raise UnknownTotalSteps("with automatic_optimization=False the module itself decides when to step")
    if any(timer.time_remaining() is not None for timer in callbacks_of(trainer, Timer)):
        raise UnknownTotalSteps("max_time can end training at any step")
    if (
        trainer.strategy.handles_gradient_accumulation
        and max((factor for factor, _ in _epochs(trainer)), default=1) > 1
    ):
        raise UnknownTotalSteps(f"{type(trainer.strategy).__name__} accumulates gradients across epochs")


def _epochs(trainer: pl.Trainer) -> list[tuple[int, int]]:
    """The accumulation factor of each epoch, and the multiple of the loader's batch size."""
    epochs = range(trainer.max_epochs or 0)
    if plans := callbacks_of(trainer, EpochPlan):  # type: ignore[type-abstract]
        return [plans[-1].step_of(trainer, epoch) for epoch in epochs]
    if schedulers := callbacks_of(trainer, GradientAccumulationScheduler):
        return [(schedulers[-1].get_accumulate_grad_batches(epoch), 1) for epoch in epochs]
    return [(trainer.accumulate_grad_batches, 1)] * len(epochs)
