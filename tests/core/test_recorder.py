"""A recorded step gives the same loss when it runs again."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_tricks.core.recorder import StepRecorder
from lightning_tricks.core.replay import random_numbers_of
from tests.nets import Net, build, fit


class Again(Callback):
    """Runs each step again in ``on_before_backward``; notes both losses."""

    def __init__(self) -> None:
        self.recorder = StepRecorder()
        self.losses: list[tuple[float, float]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.recorder.start(trainer, pl_module, lambda: trainer.global_step != 3)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        step = self.recorder.take()
        if step is None:
            self.losses.append((0.0, 0.0))
            return
        with torch.no_grad(), random_numbers_of(step.random, pl_module.device):
            self.losses.append((loss.item(), step.run().item()))
        assert self.recorder.step is None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.recorder.stop()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_run_again_gives_the_same_loss_under_dropout_and_autocast(precision: Any) -> None:
    again = Again()
    run = fit(build(Net), callbacks=[again], precision=precision)
    assert len(again.losses) == 12
    assert all(first == second for first, second in again.losses)
    assert "training_step" not in vars(run.strategy)


def test_a_step_that_is_not_wanted_is_not_recorded() -> None:
    again = Again()
    fit(build(Net), callbacks=[again])
    assert [losses == (0.0, 0.0) for losses in again.losses] == [step == 3 for step in range(12)]
