"""An optimizer's steps are told from those that were left out, and nothing of the watch stays behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_tricks.core.lightning.step_watch import StepObserver
from tests.nets import PlainNet, build, fit


class Watch(Callback):
    """What a StepObserver says after each batch."""

    def __init__(self) -> None:
        self.watch, self.said = StepObserver(), list[bool]()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.watch.start(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.said.append(self.watch.stepped())
        assert not self.watch.stepped()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.stop()
        (optimizer,) = trainer.optimizers
        assert not optimizer._optimizer_step_post_hooks


def test_only_the_last_batch_of_a_window_steps() -> None:
    watch = Watch()
    fit(build(PlainNet), callbacks=[watch], max_epochs=1, accumulate_grad_batches=4)
    assert watch.said == [False, False, False, True, False, True]


class Overflows(PlainNet):
    """The gradient of the second batch is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1.0)


def test_a_step_that_the_scaler_leaves_out_is_none() -> None:
    watch = Watch()
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    run = fit(build(Overflows), callbacks=[watch], max_epochs=1, plugins=[plugin])
    assert watch.said == [True, False, True, True, True, True]
    assert run.global_step == 6


class OfNoClass:
    """Steps, but is no torch Optimizer."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> int:
        self.steps += 1
        return self.steps


@pytest.mark.parametrize("replaced", [False, True])
def test_an_optimizer_of_another_kind_is_watched_and_left_as_it_was(replaced: bool) -> None:
    watch, run = (
        StepObserver(),
        SimpleNamespace(strategy=SingleDeviceStrategy(), optimizers=[OfNoClass()], lightning_module=PlainNet()),
    )
    watch.start(run)  # type: ignore[arg-type]
    if replaced:
        run.optimizers = [OfNoClass()]
        watch.follow(run)  # type: ignore[arg-type]
    (optimizer,) = run.optimizers
    assert optimizer.step() == 1
    assert watch.stepped()
    watch.stop()
    assert optimizer.step() == 2
    assert not watch.stepped()
    assert "step" not in vars(optimizer)
