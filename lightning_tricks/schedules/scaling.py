"""The learning rate of another batch size, and the batch size that a Trainer's devices make together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks.core.checks import check_choice, check_count, check_decays, check_duration, check_range
from lightning_tricks.core.lightning.steps import EpochPlan
from lightning_tricks.core.lightning.trainer import callbacks_of, data_parallel
from lightning_tricks.schedules.scheduler import set_lr

__all__ = ["effective_batch_size", "scale_adam", "scale_lr"]


def scale_lr(lr: float, *, batch_size: int, base_batch_size: int, rule: str = "linear", warmup: float = 0) -> float:
    """The learning rate for another batch size, by the linear rule (SGD) or the square-root rule (Adam).

    ``lr * k`` or ``lr * sqrt(k)``, ``k = batch_size / base_batch_size``. The batch size is what an optimizer step
    averages over: all devices and accumulated batches, see ``effective_batch_size``.

    Args:
        lr: Learning rate that is right for ``base_batch_size``, at least 0.
        batch_size: Number of samples of an optimizer step to train with.
        base_batch_size: Number of samples of an optimizer step that ``lr`` was found with.
        rule: The rule, ``"linear"`` or ``"sqrt"``.
        warmup: Length of the schedule's warm-up (int steps, float fraction), as passed to the schedule; 0 for none.

    Raises:
        ValueError: If an argument is out of range or the rule unknown. A linear rise without warm-up warns.

    Example:
        >>> scale_lr(0.1, batch_size=1024, base_batch_size=256, warmup=0.05)
        0.4
        >>> scale_lr(0.001, batch_size=1024, base_batch_size=256, rule="sqrt")
        0.002

    References:
        Goyal et al., Accurate, Large Minibatch SGD, arXiv 1706.02677; Malladi et al., arXiv 2205.10287.
    """
    check_range("lr", lr, 0.0)
    check_choice("rule", rule, ("linear", "sqrt"))
    check_duration("warmup", warmup)
    k = _ratio(batch_size, base_batch_size)
    if rule == "sqrt":
        return lr * math.sqrt(k)
    if k > 1 and not warmup:
        warnings.warn(
            f"The linear rule needs a warm-up for a batch {k:g} times as large (arXiv 1706.02677): give one to the"
            " schedule, and its length to scale_lr(warmup=...).",
            stacklevel=2,
        )
    return lr * k


def scale_adam(
    lr: float, *, batch_size: int, base_batch_size: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> dict[str, Any]:
    """Adam's settings for another batch size, all by the square-root rule: its averages see the same samples.

    ``lr * sqrt(k)``, ``beta' = 1 - k * (1 - beta)``, ``eps / sqrt(k)``, ``k = batch_size / base_batch_size``

    Args:
        lr: Learning rate that is right for ``base_batch_size``, at least 0.
        batch_size: Number of samples of an optimizer step to train with.
        base_batch_size: Number of samples of an optimizer step that the settings were found with.
        betas: Decay rates of Adam's two averages, in [0, 1).
        eps: Adam's epsilon, at least 0.

    Returns:
        ``{"lr": ..., "betas": ..., "eps": ...}``, for ``Adam(parameters, **...)``.

    Raises:
        ValueError: If an argument is out of range, or k is too large for a beta: ``k <= 1 / (1 - beta)``.

    Example:
        >>> settings = scale_adam(1e-3, batch_size=1024, base_batch_size=256)
        >>> settings["lr"], [round(beta, 6) for beta in settings["betas"]], settings["eps"]
        (0.002, [0.6, 0.996], 5e-09)

    References:
        Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, arXiv 2205.10287.
    """
    check_range("lr", lr, 0.0)
    check_range("eps", eps, 0.0)
    k = _ratio(batch_size, base_batch_size)
    check_decays("betas", betas)
    for place, beta in enumerate(betas):
        if k * (1 - beta) > 1 + 1e-9:  # so that k = 10 with beta = 0.9 is allowed, whatever the rounding
            raise ValueError(
                f"batch_size must be at most {base_batch_size / (1 - beta):.0f} = base_batch_size / (1 - beta) for"
                f" betas[{place}]={beta!r}, got {batch_size}: beyond it the rule's beta is negative. Use"
                ' scale_lr(..., rule="sqrt"), or a smaller batch.'
            )
    first, second = (max(0.0, 1 - k * (1 - beta)) for beta in betas)
    return {"lr": lr * math.sqrt(k), "betas": (first, second), "eps": eps / math.sqrt(k)}


_SCALED: WeakSet[Optimizer] = WeakSet()


@contextmanager
def scaled_lrs(optimizer: Optimizer, factor: float, trick: str) -> Iterator[None]:
    """Multiply the learning rates of all groups inside the block, in which the optimizer steps.

    Raises:
        MisconfigurationException: If somebody else sets one there.
    """
    groups = optimizer.param_groups
    before = [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]
    for group in groups:
        set_lr(group, group["lr"] * factor)
    _SCALED.add(optimizer)
    scaled = [group["lr"] for group in groups]
    try:
        yield
        if any(group["lr"] is not lr for group, lr in zip(groups, scaled, strict=True)):
            raise MisconfigurationException(
                f"{trick} scales the learning rate while the optimizer steps, but it was set meanwhile (in backward or"
                " on_before_optimizer_step): set it in on_train_batch_start."
            )
    finally:
        _SCALED.discard(optimizer)
        for group, lr in zip(groups, before, strict=True):
            set_lr(group, lr)


def is_scaled(optimizer: Optimizer) -> bool:
    """Whether a trick has scaled the learning rates of an optimizer for the step that it makes now."""
    return optimizer in _SCALED


def effective_batch_size(trainer: L.Trainer, *, per_device: int) -> int:
    """The samples of one optimizer step: those of a batch, on all devices of all nodes, in all accumulated batches.

    ``per_device * replicas * accumulate_grad_batches``; devices that share a batch by tensor parallelism are one
    replica. What a module accumulates itself (``automatic_optimization = False``) is not known: multiply by it.

    Args:
        trainer: The Trainer; under ModelParallelStrategy it is known in ``configure_optimizers`` and later.
        per_device: Batch size of the loader of one device, at least 1.

    Raises:
        ValueError: If ``per_device`` is less than 1, or the accumulation or the batch changes between epochs.

    Example:
        >>> trainer = L.Trainer(devices=2, accumulate_grad_batches=4, strategy="ddp", accelerator="cpu", logger=False)
        >>> effective_batch_size(trainer, per_device=8)
        64
    """
    check_count("per_device", per_device)
    for plan in callbacks_of(trainer, EpochPlan):  # type: ignore[type-abstract]
        raise ValueError(
            f"The batch size must be the same in all epochs, got a Trainer with {type(plan).__name__}, which changes"
            " it: multiply per_device and the devices by the factor of the epoch that you mean."
        )
    accumulated = {trainer.accumulate_grad_batches}
    for scheduler in callbacks_of(trainer, GradientAccumulationScheduler)[-1:]:
        accumulated = set(scheduler.scheduling.values())
    if len(accumulated) > 1:
        raise ValueError(
            f"accumulation must be the same in all epochs for one batch size, got factors {sorted(accumulated)} of"
            " GradientAccumulationScheduler: multiply by the factor of the epoch that you mean."
        )
    return per_device * data_parallel(trainer)[1] * accumulated.pop()


def _ratio(batch_size: int, base_batch_size: int) -> float:
    check_count("batch_size", batch_size)
    check_count("base_batch_size", base_batch_size)
    return batch_size / base_batch_size
