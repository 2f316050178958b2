"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.averages import Averages
from lightning_tricks.core.checks import (
    check_bool,
    check_choice,
    check_count,
    check_duration,
    check_range,
    duration_steps,
)
from lightning_tricks.core.trainer import StepWatch, is_fitting, require_whole_weights, wrap_method
from lightning_tricks.core.weights import float_buffers, trainable
from lightning_tricks.schedules.steps import optimizer_steps


def ema_decay(updates: int, decay: float, *, warmup: bool = True, every_n_steps: int = 1) -> float:
    """The decay of an update: ``d = min(decay**every_n_steps, (1+updates)/(10+updates))``, the minimum with warm-up.

    Args:
        updates: Updates made before this one.
        decay: Decay per optimizer step, in [0, 1).
        warmup: Whether young averages forget faster.
        every_n_steps: Optimizer steps between updates.

    Returns:
        d of ``average = d * average + (1-d) * weight``.

    Example:
        >>> ema_decay(0, 0.999), ema_decay(10**6, 0.999)
        (0.1, 0.999)
    """
    corrected = decay**every_n_steps
    return min(corrected, (1 + updates) / (10 + updates)) if warmup else corrected


@final
class EMA(Callback):
    """Averaged weights for validation, checkpoints and the end: ``average += (1-d) * (weight - average)``.

    The average starts as a copy of the weights once ``start`` is reached (fp32 at least, whatever the weights are) and
    is updated after every training batch in which an optimizer stepped. d is ``decay``, with warm-up
    ``min(decay, (1+n)/(10+n))`` after n updates. Trainable parameters are averaged; a parameter unfrozen later joins at
    the next epoch. Before the first update the averaged weights *are* the raw weights.

    In a checkpoint ``state_dict`` holds the weights that were validated and this callback's state the others, so the
    file loads anywhere without this package and a resumed fit continues exactly. Exceptions and Ctrl-C leave the module
    with its raw weights. One object can be used for several fits: with another Trainer or module it starts anew.

    Args:
        decay: Decay per optimizer step, in [0, 1).
        warmup: Whether young averages forget faster.
        every_n_steps: Update once in so many optimizer steps, with ``decay**every_n_steps``.
        start: When averaging begins (int optimizer steps, float fraction of training).
        buffers: "copy" keeps the module's current buffers, "average" averages the floating-point ones too.
        validate: Validate "averaged" or "raw" weights.
        at_end: Which weights the module holds when training has ended, "averaged" or "raw".
        device: Where the average lives: None for beside the weights, or for example "cpu".

    Raises:
        ValueError: For a value out of range.
        MisconfigurationException: At setup, under a strategy that shards the weights. (A second EMA in one Trainer
            is refused by the Trainer.)

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[EMA(decay=0.999)], accelerator="cpu", logger=False)

    References:
        Polyak and Juditsky 1992; warm-up as in TensorFlow's ``ExponentialMovingAverage(num_updates=...)``.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        warmup: bool = True,
        every_n_steps: int = 1,
        start: int | float = 0,
        buffers: Literal["copy", "average"] = "copy",
        validate: Literal["averaged", "raw"] = "averaged",
        at_end: Literal["averaged", "raw"] = "averaged",
        device: str | None = None,
    ) -> None:
        check_range("decay", decay, 0.0, 1.0, below=True)
        check_bool("warmup", warmup)
        check_count("every_n_steps", every_n_steps)
        check_duration("start", start)
        check_choice("buffers", buffers, ("copy", "average"))
        check_choice("validate", validate, ("averaged", "raw"))
        check_choice("at_end", at_end, ("averaged", "raw"))
        self.decay = decay
        self.warmup = warmup
        self.every_n_steps = every_n_steps
        self.start = start
        self.buffers = buffers
        self.validate = validate
        self.at_end = at_end
        self.device = None if device is None else str(torch.device(device))
        self._trainer: pl.Trainer | None = None
        self._averages: Averages | None = None
        self._steps = 0
        self._start_step = 0.0
        self._watch = StepWatch()
        self._unwrap: Callable[[], None] | None = None

    @contextmanager
    def averaged(self, pl_module: pl.LightningModule) -> Iterator[None]:
        """Averaged weights in ``pl_module`` inside the ``with`` block; what it held before is always put back.

        Args:
            pl_module: The module that was or is being trained with this callback.

        Raises:
            ValueError: If this callback has no average of that module.
        """
        if self._averages is None or self._averages.module is not pl_module:
            raise ValueError(f"This EMA has no average of that {type(pl_module).__name__}: fit it with EMA first.")
        before = self._averages.holds
        self._averages.show("averaged")
        try:
            yield
        finally:
            self._averages.show(before)

    def averaged_state_dict(self) -> dict[str, Any]:
        """A copy of the module's ``state_dict()`` with the averaged weights in it.

        Raises:
            ValueError: If nothing was trained with this callback yet.
        """
        if self._averages is None:
            raise ValueError("This EMA has no average yet: fit a module with it first.")
        state = self._averages.state_dict_with("averaged", self._averages.module.state_dict)
        return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not is_fitting(trainer):
            return
        require_whole_weights(trainer, "EMA")
        goes_on = trainer is self._trainer and self._averages is not None and self._averages.module is pl_module
        if self._averages is not None and goes_on and self._averages.untouched():
            self._averages.show("raw")
        else:
            self._trainer, self._averages, self._steps = trainer, Averages(pl_module, self.device), 0
        self._end_saving()  # still wrapped if the last fit failed, perhaps that of another Trainer
        self._unwrap = wrap_method(trainer.strategy, "lightning_module_state_dict", self._validated_state_dict)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = optimizer_steps(trainer) if isinstance(self.start, float) and self.start else 0
        self._start_step = duration_steps(self.start, total)
        if self._running.tensors or trainer.global_step >= self._start_step:
            self._track(pl_module)
        self._watch.start(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0 and self._running.tensors:
            self._track(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._watch.stepped():
            return
        if self._running.tensors:
            self._update()
        elif trainer.global_step >= self._start_step:
            self._track(pl_module)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_fitting(trainer):
            self._running.show(self.validate)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_fitting(trainer):
            self._running.show("raw")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch.stop()
        self._running.show(self.at_end)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._watch.stop()
        if is_fitting(trainer) and self._averages is not None:
            self._averages.show("raw")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if is_fitting(trainer):
            self._end_saving()

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._averages is None or not self._averages.tensors:
            return {}
        # after the fit nothing is wrapped any more and the module is saved as it is
        saved = self._averages.holds if self._unwrap is None else self.validate
        return {"steps": self._steps, **self._averages.state_dict(saved)}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not is_fitting(trainer):
            self._averages = None  # the module now holds the weights of that checkpoint
        elif state := checkpoint["callbacks"].get(self.state_key):
            self._steps = state["steps"]
            self._running.load_state_dict(state, strict=pl_module.strict_loading)

    @property
    def _running(self) -> Averages:
        assert self._averages is not None, "setup comes first"
        return self._averages

    def _track(self, pl_module: pl.LightningModule) -> None:
        buffers = float_buffers(pl_module) if self.buffers == "average" else {}
        self._running.track({**trainable(pl_module), **buffers})

    def _update(self) -> None:
        self._steps += 1
        if self._steps % self.every_n_steps == 0:
            updates = self._running.updates
            decay = ema_decay(updates, self.decay, warmup=self.warmup, every_n_steps=self.every_n_steps)
            self._running.lerp(1 - decay)

    def _validated_state_dict(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return original() if self._averages is None else self._averages.state_dict_with(self.validate, original)

    def _end_saving(self) -> None:
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None
