"""Training steps on trial: nothing is logged, and everything is afterwards as if they had not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_tricks.core.replay import ModuleState, random_numbers_of, random_state
from lightning_tricks.core.wrapping import wrap_method


@contextmanager
def on_trial(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
    """Run steps without gradients inside the block, from the random numbers that the next step draws from."""
    device, loggers, state = pl_module.device, trainer.loggers, ModuleState(pl_module)
    try:
        wrap_method(pl_module, "log", lambda *_, **__: None)  # an attribute, so undone with the module's state
        trainer.loggers = [DummyLogger() for _ in loggers]
        with torch.no_grad(), random_numbers_of(random_state(device), device):
            yield
    finally:
        trainer.loggers = loggers
        state.restore()


def step_arguments(pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """The arguments of ``training_step`` as Lightning makes them."""
    indexed = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
    return (batch, batch_idx) if indexed else (batch,)
