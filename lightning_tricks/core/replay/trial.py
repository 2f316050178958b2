"""Trial steps: training steps that log nothing and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.replay.random_numbers import random_numbers_of, random_state


@contextmanager
def trial_steps(trainer: pl.Trainer, pl_module: pl.LightningModule, *, deep: bool = False) -> Iterator[None]:
    """Run steps without gradients inside the block, with the random numbers that the next step will draw.

    Args:
        trainer: The Trainer.
        pl_module: Its module.
        deep: Whether steps may write into tensors inside containers, which are copied before.
    """
    device, loggers, state = pl_module.device, trainer.loggers, ModuleState(pl_module, deep=deep)
    ddp: Any = trainer.strategy.model
    exchanges = getattr(ddp, "require_forward_param_sync", None)  # DDP stops it after a forward pass without gradients
    try:
        wrap_method(pl_module, "log", lambda *_, **__: None)  # an attribute, which state.restore() removes
        trainer.loggers = [DummyLogger() for _ in loggers]
        with torch.no_grad(), random_numbers_of(random_state(device), device):
            yield
        state.refuse_writes()
        state.refuse_counts()
    finally:
        trainer.loggers = loggers
        state.restore()
        if exchanges is not None:
            ddp.require_forward_param_sync = exchanges
