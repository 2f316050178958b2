"""Inputs that grow: their size at an optimizer step, and the base class of callbacks that make them smaller."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_tricks.core.batches.callback import BatchCallback
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.fit import plan_step, steps_of
from lightning_tricks.core.lightning.trainer import callbacks_of
from lightning_tricks.core.trick import Trick

__all__ = ["growing_size"]

_COMPILED_SIZES = 8  # torch.compile gives up on a function that it has compiled for more sizes than that


def growing_size(step: float, *, full: int, initial: float, start: float = 0, stop: float, multiple_of: int = 1) -> int:
    """The size of a growing input: ``share * full``, rounded to ``multiple_of``, from ``initial * full`` to ``full``.

    ``share = initial + (1 - initial) * (step - start) / (stop - start)``, ``initial`` before ``start``; the size is
    ``full`` from ``stop`` on, and always with ``initial=1``.

    Args:
        step: The number of optimizer steps so far.
        full: The full size, at least 0.
        initial: The share of it at first, in (0, 1].
        start: The optimizer step at which growth begins.
        stop: The optimizer step at which it ends, at least ``start``.
        multiple_of: The number of which smaller sizes are multiples, at least 1.

    Returns:
        The size, at least ``multiple_of`` and at most ``full``.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.

    Example:
        >>> [growing_size(step, full=100, initial=0.25, stop=10, multiple_of=8) for step in (0, 5, 9, 10)]
        [24, 64, 96, 100]
    """
    _check(initial, multiple_of)
    check_count("full", full, least=0)
    for name, value in (("step", step), ("start", start), ("stop", stop)):
        check_range(name, value, 0.0)
    if start > stop:
        raise ValueError(f"start must not be after stop, got start={start} and stop={stop}.")
    if step >= stop or initial == 1:
        return full
    progress = (step - start) / (stop - start) if step > start else 0.0
    share = initial + (1 - initial) * progress
    return min(full, max(1, round(full * share / multiple_of)) * multiple_of)


class GrowingInputs(BatchCallback):
    """Makes the inputs of a batch smaller, by its share of the full size at the optimizer step.

    A subclass sets ``initial`` and ``multiple_of``, too, before ``super().__init__()``, and says how in ``_shrunk``.
    """

    initial: float
    multiple_of: int
    order = -2  # before anything that is faster on smaller inputs
    conflicts = (
        Conflict(
            ("GrowingInputs",),
            "the one would make smaller what the other has made smaller already",
            "Keep one, and name all the inputs in its inputs=",
            lambda one, other: type(one) is type(other),
        ),
    )

    def __init__(self) -> None:
        _check(self.initial, self.multiple_of)
        super().__init__()

    @abstractmethod
    def _shrunk(self, context: BatchContext, size: Callable[[int], int]) -> Any:
        """The smaller batch; ``size`` is a function of the full size."""

    @override
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        context.batch = self._shrunk(context, partial(self._size, trainer))

    @override
    def _check(self, trainer: L.Trainer, context: BatchContext) -> None:
        """No check is needed: inputs shrink from the first batch on, or not at all."""

    def _size(self, trainer: L.Trainer, full: int) -> int:
        step, start, stop = float(plan_step(trainer)), self._steps.get("start", 0), self._steps["stop"]
        compiles = any(trick.compiles for trick in callbacks_of(trainer, Trick))
        if compiles and step > start:
            stages = _COMPILED_SIZES - 1  # and the full size
            step = start + math.floor(stages * (step - start) / (stop - start)) / stages * (stop - start)
        return growing_size(step, full=full, initial=self.initial, start=start, stop=stop, multiple_of=self.multiple_of)

    @override
    def _is_active(self, trainer: L.Trainer) -> bool:
        return bool(self._steps) and self.initial < 1 and plan_step(trainer) < self._steps["stop"]

    @override
    def _in_steps(self, trainer: L.Trainer, name: str, duration: Any) -> Any:
        if self.initial == 1:  # nothing grows, so that the length of the training need not be known
            return 0.0
        return steps_of(trainer, duration, type(self).__name__, name)  # growth may last to the very end

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._steps.get("start", 0) > self._steps["stop"]:
            raise MisconfigurationException(
                f"{type(self).__name__} grows from start to stop, got start={self.start!r} and stop={self.stop!r},"
                f" optimizer steps {self._steps['start']:g} and {self._steps['stop']:g}: give both in one unit."
            )


def _check(initial: float, multiple_of: int) -> None:
    check_range("initial", initial, 0.0, 1.0)
    if initial == 0:
        raise ValueError(f"initial must be in (0, 1], got {initial}: the first inputs must have a size.")
    check_count("multiple_of", multiple_of)
