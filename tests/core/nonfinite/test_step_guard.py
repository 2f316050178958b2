"""Steps left out; with everything around them see tests/callbacks/test_skip_non_finite.py."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

import lightning_tricks as lt
from lightning_tricks.core.lightning.step_watch import StepObserver
from lightning_tricks.core.nonfinite.step_guard import Buffers, SkipStep, StepGuard, Window
from tests.batches import refused
from tests.nets import NormNet, PlainNet, assert_equal, build, fit, weights


class LeavesOut(Callback):
    """Leaves out the second and third step, and notes what a StepObserver and ``global_step`` say after each batch."""

    def __init__(self) -> None:
        self.guard, self.watch, self.said, self.asked = StepGuard(), StepObserver(), list[Any](), 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.undo = ExitStack()
        self.guard.start(trainer, "LeavesOut", self.undo)
        self.watch.start(trainer)

    def on_train_batch_start(self, *_: Any) -> None:
        self.guard.begin_batch()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.asked += 1
        if self.asked in (2, 3):
            raise SkipStep

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.said.append((self.watch.stepped(), trainer.global_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.undo.close()
        assert "optimizer_step" not in vars(trainer.strategy)
        assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop)


class Scheduled(NormNet):
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


@pytest.mark.parametrize(("interval", "lr"), [("step", 0.5**4), ("epoch", 0.5)])
def test_it_is_no_step_for_anybody(interval: str, lr: float) -> None:
    callback, module = LeavesOut(), build(Scheduled)
    module.interval = interval
    run = fit(module, callbacks=[callback], max_epochs=1)
    assert callback.said == [(True, 1), (False, 1), (False, 1), (True, 2), (True, 3), (True, 4)]
    assert run.optimizers[0].param_groups[0]["lr"] == lr
    assert run.global_step == 4


def test_a_window_gives_the_buffers_back() -> None:
    module = build(NormNet)
    run = fit(module, accumulate_grad_batches=2, max_epochs=1)
    window, before = Window(), weights(module)
    for _ in range(2):
        for batch_idx in range(2):
            window.begin_batch(run, module, batch_idx)
            module(torch.randn(8, 8))
        assert not torch.equal(module.layers[1].running_mean, before["layers.1.running_mean"])
        window.restore()
        assert_equal(weights(module), before)
    module(torch.randn(8, 8))
    after = weights(module)
    window.begin_batch(run, module, 2)
    module(torch.randn(8, 8))
    window.restore()
    assert_equal(weights(module), after)


def test_buffers_that_are_replaced_or_made_or_lost_come_back() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module.register_buffer("none", None)
    module.register_buffer("shared", module[0].running_var)
    module.register_buffer("scalar", torch.tensor(1.0))
    module.register_buffer("expanded", torch.ones(1).expand(3))
    names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    mean, before = module[0].running_mean, weights(module)
    buffers = Buffers(module)
    module[0].running_mean = torch.full((3,), torch.nan)
    module.shared.fill_(torch.nan)
    module.none = torch.ones(1)
    module[1].register_buffer("new", torch.ones(1))
    del module.scalar
    buffers.restore()
    assert_equal(weights(module), before)
    assert module[0].running_mean is mean
    assert module.shared is module[0].running_var
    assert sorted(name for name, _ in module.named_buffers(remove_duplicate=False)) == sorted(names)


def test_the_buffers_of_torchscript_come_back() -> None:
    module = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)), nn.BatchNorm1d(3))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    buffers = Buffers(module)
    module(torch.randn(4, 3))
    assert not torch.equal(module[0].running_mean, before["0.running_mean"])
    buffers.restore()
    assert_equal(dict(module.named_buffers()), before)


class OwnOptimizer(PlainNet):
    """Steps an optimizer that Lightning does not know."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.mine = torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.mine.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.mine.step()


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_guard_refuses_the_steps_of_an_optimizer_that_lightning_does_not_know() -> None:
    refused(OwnOptimizer, "OwnOptimizer.training_step steps SGD past Lightning", [lt.SkipNonFinite()])
