"""The optimizer steps that a fit plans: all of them, and those before an epoch and a batch."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Collection
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, Timer

from lightning_tricks.core.lightning.loaders import train_batches_of_sizes
from lightning_tricks.core.lightning.trainer import callbacks_of

__all__ = ["UnknownTotalSteps"]

_BY_STEPS = "end training by Trainer(max_steps=...) in place of max_epochs"


class UnknownTotalSteps(ValueError):
    """The number of optimizer steps cannot be known before training; the message says why and what to pass.

    Args:
        reason: Why it cannot be known, a clause.
        otherwise: What can be done instead of passing the number, a clause; empty if there is nothing else.

    Example:
        >>> raise UnknownTotalSteps("the training loader has no length")
        Traceback (most recent call last):
        lightning_tricks.core.lightning.steps.UnknownTotalSteps: the training loader has no length; pass total_steps=...
    """

    def __init__(self, reason: str, otherwise: str = "") -> None:
        super().__init__(f"{reason}; pass total_steps=...{f', or {otherwise}.' if otherwise else ''}")
        self.reason = reason
        self.otherwise = otherwise


class EpochPlan(Callback):
    """A callback that changes accumulation or batch size between epochs, and tells ``optimizer_steps`` so."""

    @abstractmethod
    def step_of(self, trainer: L.Trainer, epoch: int) -> tuple[int, int]:
        """The number of batches per optimizer step in an epoch, and the multiple of the loader's batch size."""

    def changes(self, trainer: L.Trainer) -> Collection[int]:
        """The epochs in which ``step_of`` may differ from the epoch before; every epoch, unless a subclass knows."""
        return range(trainer.max_epochs or 0)


class Span(NamedTuple):
    """Epochs with the same number of optimizer steps, from ``first`` on.

    Args:
        first: The first of these epochs.
        batches: B, the number of training batches in each of them.
        accumulated: a, the number of batches per optimizer step.
    """

    first: int
    batches: int
    accumulated: int


class Plan(NamedTuple):
    """The optimizer steps of a fit under the present settings of its Trainer, in closed form.

    Args:
        spans: The spans of epochs, in their order; empty if steps alone end training, and epochs have no known length.
        max_epochs: The number of epochs; None for no limit.
        max_steps: The number of optimizer steps; None for no limit.
    """

    spans: tuple[Span, ...]
    max_epochs: int | None
    max_steps: int | None

    def span_of(self, epoch: int) -> Span:
        """The span that an epoch is in."""
        return self.spans[bisect_right([span.first for span in self.spans], epoch) - 1]

    def steps_before(self, epoch: int, batch: int = 0) -> int:
        """The planned number of optimizer steps before a batch of an epoch: ``sum_e ceil(B_e/a_e) + batch // a``.

        Example:
            >>> plan = Plan((Span(0, batches=7, accumulated=2), Span(1, batches=7, accumulated=7)), 3, None)
            >>> plan.steps_before(3), plan.steps_before(1), plan.steps_before(0, batch=5)
            (6, 4, 2)
        """
        edges = [span.first for span in self.spans if span.first < epoch] + [epoch]
        whole = zip(self.spans, pairwise(edges), strict=False)
        steps = sum((after - first) * -(-span.batches // span.accumulated) for span, (first, after) in whole)
        _, batches, accumulated = self.span_of(epoch)
        return steps + (-(-batch // accumulated) if batch == batches else batch // accumulated)

    def placed(self, epoch: int, batch: int, taken: int) -> tuple[int, int]:
        """The total number of planned steps, and the step of the plan at a position.

        Where epochs end training, this is ``steps_before`` of the end and of the position; where ``max_steps`` does,
        the real number of steps decides.

        Args:
            epoch: The epoch that training goes on in.
            batch: The number of its batches that training has had.
            taken: The number of optimizer steps that training has really taken.

        Example:
            >>> Plan((Span(0, batches=5, accumulated=1),), 4, None).placed(epoch=2, batch=0, taken=20)
            (20, 10)
            >>> Plan((Span(0, batches=5, accumulated=1),), 4, 22).placed(epoch=2, batch=0, taken=20)
            (22, 20)
        """
        if self.max_epochs is not None:
            total, before = self.steps_before(self.max_epochs), self.steps_before(epoch, batch)
            if self.max_steps is None or total - before <= self.max_steps - taken:
                return total, before
        assert self.max_steps is not None, "a plan has an end"
        return self.max_steps, taken


def plan_of(trainer: L.Trainer) -> Plan:
    """The plan of the Trainer's fit under its present settings; all ranks take part.

    Raises:
        UnknownTotalSteps: If steps cannot be counted before they are taken.
    """
    _refuse_what_cannot_be_counted(trainer)
    max_steps = None if trainer.max_steps == -1 else trainer.max_steps
    if trainer.max_epochs == -1:
        if max_steps is None:
            raise UnknownTotalSteps("max_epochs=-1 and max_steps=-1 let training run forever", _BY_STEPS)
        spans: tuple[Span, ...] = ()
        with suppress(UnknownTotalSteps):
            spans = _spans(trainer) if trainer.fit_loop._combined_loader is not None else ()
        plan = Plan(spans, None, max_steps if trainer.limit_train_batches else 0)
    else:
        plan = Plan(_spans(trainer), trainer.max_epochs or 0, max_steps)
    if plan.placed(0, 0, 0)[0] < 1:
        raise UnknownTotalSteps(
            f"there is no optimizer step to count with max_epochs={trainer.max_epochs},"
            f" max_steps={trainer.max_steps}, limit_train_batches={trainer.limit_train_batches}"
        )
    return plan


def _spans(trainer: L.Trainer) -> tuple[Span, ...]:
    tries = trainer.fast_dev_run  # type: ignore[attr-defined]
    if trainer.reload_dataloaders_every_n_epochs and not tries:  # type: ignore[attr-defined]
        raise UnknownTotalSteps(
            f"{_loader_name(trainer)} is reloaded and can change its length, by reload_dataloaders_every_n_epochs="
            f"{trainer.reload_dataloaders_every_n_epochs}",  # type: ignore[attr-defined]
            _BY_STEPS,
        )
    sizes = _sizes(trainer)
    multiples = {multiple for _, multiple in sizes.values()}
    batches = train_batches_of_sizes(trainer, multiples)
    if batches is None and tries:  # a stream whose real fit is ended by max_steps is tried, too
        batches = dict.fromkeys(multiples, int(trainer.limit_train_batches))
    if batches is None:
        raise UnknownTotalSteps(
            f"{_loader_name(trainer)} has no length that can be relied on (none attached yet, an IterableDataset, or a"
            " length that differs between ranks)",
            _BY_STEPS,
        )
    return tuple(Span(epoch, batches[multiple], accumulated) for epoch, (accumulated, multiple) in sizes.items())


def _loader_name(trainer: L.Trainer) -> str:
    """The training loader with the class that it is of, or that makes it."""
    source = trainer.fit_loop._data_source.instance
    return "the training loader" + ("" if source is None else f" of {type(source).__name__}")


def _refuse_what_cannot_be_counted(trainer: L.Trainer) -> None:
    if trainer.lightning_module is None:
        raise UnknownTotalSteps("the Trainer has no module and data yet (ask in configure_optimizers or later)")
    if not trainer.lightning_module.automatic_optimization:
        raise UnknownTotalSteps("with automatic_optimization=False the module itself decides when to step")
    if any(timer.time_remaining() is not None for timer in callbacks_of(trainer, Timer)):
        raise UnknownTotalSteps("max_time can end training at any step")
    if trainer.strategy.handles_gradient_accumulation and max(factor for factor, _ in _sizes(trainer).values()) > 1:
        raise UnknownTotalSteps(f"{type(trainer.strategy).__name__} accumulates gradients across epochs")


def _sizes(trainer: L.Trainer) -> dict[int, tuple[int, int]]:
    """The batches per optimizer step and the multiple of the batch size, by the epoch from which on they hold."""
    if plans := callbacks_of(trainer, EpochPlan):  # type: ignore[type-abstract]
        sizes = {epoch: plans[-1].step_of(trainer, epoch) for epoch in sorted({0, *plans[-1].changes(trainer)})}
    elif schedulers := callbacks_of(trainer, GradientAccumulationScheduler):
        sizes = {epoch: (factor, 1) for epoch, factor in sorted(schedulers[-1].scheduling.items())}
    else:
        return {0: (trainer.accumulate_grad_batches, 1)}
    most = trainer.max_epochs or 0
    return {epoch: size for epoch, size in sizes.items() if epoch == 0 or most == -1 or epoch < most}
