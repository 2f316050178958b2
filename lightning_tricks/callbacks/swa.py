"""Stochastic weight averaging."""

from __future__ import annotations

from typing import Any, Literal, final

import lightning as L
from typing_extensions import override

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.batchnorm import recalibrate_averages, require_recalibration
from lightning_tricks.core.averaging.callback import AveragingCallback
from lightning_tricks.core.checks import check_bool, check_choice, check_count, check_duration

__all__ = ["SWA"]


@final
class SWA(AveragingCallback):
    """Mean of the weights over the late epochs, for validation, checkpoints and the end.

    ``average += (weight - average) / (n+1)`` with n snapshots before this one. The first snapshot is taken at the
    optimizer step that reaches ``start``, further ones at the end of every training epoch or after every
    ``every_n_steps`` optimizer steps. The last weights are always included: training that ends anywhere else, by
    ``max_steps``, ``max_time`` or early stopping, ends with a snapshot. The learning rate is that of your schedule:
    keep it high, or let it cycle.

    When training ends, BatchNorm statistics of the averaged weights are computed in one more pass over the training
    batches of an epoch, by ``training_step`` without gradients. (A step that needs gradients can use
    ``torch.enable_grad()``.) The pass logs nothing, and leaves the module's own statistics, random numbers and step
    counts unchanged. Validations before the end use the module's current BatchNorm statistics.

    If the end was planned (``max_epochs`` or ``max_steps``), the last validation and the last checkpoint use these
    statistics. Otherwise the pass comes after them, and ``trainer.save_checkpoint`` saves its result. Before the first
    snapshot the averaged weights *are* the raw weights. Checkpoints, resume, exceptions and repeated fits are as with
    ``EMA``; a fit that is continued after its end keeps the snapshot of that end. A fit also goes on from a checkpoint
    of Lightning's ``StochasticWeightAveraging`` or ``WeightAveraging``.

    Args:
        start: When averaging begins (int optimizer steps, float fraction of training). 0 averages all epochs, without
            the weights before training; 1.0 gives the last weights.
        every_n_steps: Optimizer steps between snapshots, at least 1; None for the end of each training epoch.
        recalibrate_batchnorm: Whether to compute BatchNorm statistics for the averaged weights; costs nothing without
            BatchNorm.
        validate: The weights to validate: "averaged", "raw", or "both" as with ``EMA``.
        at_end: The weights in the module after training: "averaged" or "raw".

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start, if statistics are to be computed for a module with BatchNorm and manual
            optimization or a ``training_step(dataloader_iter)``; under a strategy whose shards are not accessible;
            when training starts, if ``start`` is a fraction of an unknown length; in the first step, if it changes what
            could not be restored after a run for those statistics.
        RuntimeError: When training ends, if the training loader cannot be read again.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[SWA(start=0.75)], accelerator="cpu", logger=False)

    References:
        Izmailov et al., arXiv 1803.05407.
    """

    kinds = ("StochasticWeightAveraging", "WeightAveraging")

    def __init__(
        self,
        start: int | float = 0.75,
        *,
        every_n_steps: int | None = None,
        recalibrate_batchnorm: bool = True,
        validate: Literal["averaged", "raw", "both"] = "averaged",
        at_end: Literal["averaged", "raw"] = "averaged",
    ) -> None:
        check_duration("start", start)
        check_count("every_n_steps", every_n_steps, optional=True)
        check_bool("recalibrate_batchnorm", recalibrate_batchnorm)
        check_choice("validate", validate, ("averaged", "raw", "both"))
        check_choice("at_end", at_end, ("averaged", "raw"))
        super().__init__()
        self.start = start
        self.every_n_steps = every_n_steps
        self.recalibrate_batchnorm = recalibrate_batchnorm
        self.buffers = "copy"
        self.validate = validate
        self.at_end = at_end
        self.device = None
        self._failure: Exception | None = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self.recalibrate_batchnorm:
            require_recalibration(self, trainer, pl_module, "pass recalibrate_batchnorm=False")

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.is_last_batch:
            self._end_epoch()  # the epoch's last step may have been in an earlier batch

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._end_epoch()  # on_train_batch_start may have ended the epoch early

    @override
    def _begin(self, trainer: L.Trainer, averages: Averages) -> None:
        self._snapshot(averages)

    @override
    def _update(self, trainer: L.Trainer, averages: Averages) -> None:
        averages.steps += 1
        # Not only in _end_epoch, so that a checkpoint right after the epoch's last step has the snapshot, too.
        if trainer.is_last_batch if self.every_n_steps is None else averages.steps >= self.every_n_steps:
            self._snapshot(averages)

    @override
    def _finish(self, trainer: L.Trainer, averages: Averages) -> None:
        if averages.steps:
            self._snapshot(averages)
        if self.recalibrate_batchnorm and averages.updates:
            try:
                self._shared.agree()
                recalibrate_averages(trainer, averages)
            except Exception as error:
                self._failure = error  # raised after the last validation and the last checkpoint

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _end_epoch(self) -> None:
        if self.every_n_steps is None and self._running.steps:
            self._snapshot(self._running)

    def _snapshot(self, averages: Averages) -> None:
        averages.lerp(1 / (averages.updates + 1))
        averages.steps = 0  # optimizer steps since the last snapshot
