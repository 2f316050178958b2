"""A fit that is resumed at the end of an epoch goes on as an unbroken one does."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop


def begin_epoch(trainer: pl.Trainer, loader: Any) -> None:
    """Mend what Lightning (2.6.6) does in a fit from an epoch's end, when it has made the training loader.

    It starts the loader's workers before it tells the sampler the epoch, so they read in the order of the first one.
    With ``max_steps`` it also takes the epoch for an unfinished one, and trains one batch of the next, or none.
    """
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.current
    if not trainer.training:
        return
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epochs.processed)
    is_over = epochs.ready == epochs.started == epochs.processed and loop.epoch_loop.batch_progress.is_last_batch
    if loop.restarting and is_over:
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # with those of the loops in it
