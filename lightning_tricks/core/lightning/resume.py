"""Makes a fit that is resumed at an epoch's end continue like an uninterrupted one."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loops.loop import _Loop


def epoch_is_over(trainer: L.Trainer) -> bool:
    """Whether a restored fit has no batch left in the epoch that it was saved in."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    return bool(epochs.started == epochs.processed or batches.is_last_batch)


def leave_last_batch(trainer: L.Trainer) -> None:
    """Begin to count batches anew after the last one of an epoch, when the epoch loop has been reset.

    Lightning (2.6.6) does so in a resumed fit if it knows the number of batches.
    """
    loop = trainer.fit_loop.epoch_loop
    if loop.restarted_on_train_batch_end and loop.batch_progress.is_last_batch:
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        loop.val_loop.batch_progress.total.reset()


def begin_epoch(trainer: L.Trainer, loader: Any) -> None:
    """Mend what Lightning (2.6.6) does in a fit from an epoch's end, when it has made the training loader.

    It starts the loader's workers before it tells the sampler the epoch, so they read in the order of the first one.
    With ``max_steps``, or from a checkpoint that was saved when the next epoch began, it also takes the epoch for an
    unfinished one, and trains one batch of the next, or none. And it takes an epoch for a finished one if the step of
    its last batch has failed.
    """
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.current
    batches: Any = loop.epoch_loop.batch_progress
    if not trainer.training:
        return
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epochs.processed)
    if loop.restarting and batches.current.ready > batches.current.processed:
        batches.is_last_batch = False
    if loop.restarting and epochs.ready > epochs.started:
        total: Any = loop.epoch_progress.total
        for tracker in (epochs, total):
            tracker.ready = tracker.started  # the epoch begins, and its hooks run, once more
    is_over = epochs.ready == epochs.started == epochs.processed and batches.is_last_batch
    if loop.restarting and is_over:
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # with those of the loops in it
