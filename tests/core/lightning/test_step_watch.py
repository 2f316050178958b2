"""An optimizer's steps are told from those that were left out, and nothing of the watch stays behind."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks.core.lightning.step_watch import StepObserver
from tests.batches import refused
from tests.nets import PlainNet, assert_close, assert_equal, build, fit


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
    held = {"strategy": SingleDeviceStrategy(), "optimizers": [OfNoClass()], "lightning_module": PlainNet()}
    watch, run = StepObserver(), SimpleNamespace(**held)
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


class Bypasses(PlainNet):
    """Steps torch's optimizer itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step() if hasattr(optimizer, "optimizer") else torch.optim.SGD.step(optimizer)


@pytest.mark.parametrize(
    "trick",
    [
        *(lt.SkipNonFinite, lt.RewindOnSpike, lt.TerminateOnNonFinite, lt.AutoClip, lt.AdaptiveClip),
        partial(lt.BatchSizeWarmup, lr_rule="linear"),
    ],
    ids=["SkipNonFinite", "RewindOnSpike", "TerminateOnNonFinite", "AutoClip", "AdaptiveClip", "BatchSizeWarmup"],
)
def test_a_step_past_the_hooks_is_refused_before_it_is_made(trick: Any) -> None:
    refused(Bypasses, r"Bypasses\.optimizer_step .*optimizer\.step\(closure=closure\)", [trick()])


def test_averages_follow_a_step_past_the_hooks() -> None:
    plain, averaged = build(PlainNet), build(Bypasses)
    emas = [lt.EMA(0.9, at_end="raw"), lt.EMA(0.9, at_end="raw")]
    fit(plain, callbacks=emas[:1])
    fit(averaged, callbacks=emas[1:])
    first, second = (ema.averaged_state_dict() for ema in emas)
    assert_close(first, second)


class OwnOptimizerMade(PlainNet):
    """Steps an optimizer that Lightning does not know, as ``made`` says."""

    automatic_optimization = False
    made = "in __init__"

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.mine = [super().configure_optimizers()]

    def configure_optimizers(self) -> Any:
        if self.made == "in configure_optimizers":
            self.mine = [super().configure_optimizers()]
        if self.made == "beside another":
            return torch.optim.SGD([self.layers[0].bias], lr=0.0)
        return self.mine if self.made == "and returned" else None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.made == "in training_step" and self.current_epoch == batch_idx == 0:
            self.mine = [super().configure_optimizers()]
        self.mine[0].zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.mine[0].step()


MADE = ["in __init__", "in configure_optimizers", "in training_step", "beside another", "and returned"]


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("made", MADE)
def test_averages_count_the_steps_of_an_optimizer_that_lightning_does_not_know(made: str) -> None:
    ema, known = lt.EMA(0.9), lt.EMA(0.9)
    module = build(OwnOptimizerMade)
    module.made = made
    fit(module, callbacks=[ema])
    fit(build(PlainNet), callbacks=[known])
    assert ema._running.updates == 12
    assert_equal(ema.averaged_state_dict(), known.averaged_state_dict())
    swa, module = lt.SWA(start=0), build(OwnOptimizerMade)
    module.made = made
    fit(module, callbacks=[swa])
    assert swa._running.updates > 0


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("made", MADE)
def test_averages_that_start_after_steps_that_lightning_does_not_count_are_refused(made: str) -> None:
    module = build(OwnOptimizerMade)
    module.made = made
    with pytest.raises(MisconfigurationException, match=r"EMA\(start=3\) waits .* OwnOptimizerMade steps an optimizer"):
        fit(module, callbacks=[lt.EMA(0.9, start=3)], max_epochs=1)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_averages_do_not_count_steps_on_other_tensors() -> None:
    class Attack(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            moved = torch.zeros(8, requires_grad=True)
            moved.grad = torch.ones(8)
            torch.optim.SGD([moved], lr=0.1).step()
            return super().training_step(batch, batch_idx)

    ema = lt.EMA(0.9)
    fit(build(Attack), callbacks=[ema], accumulate_grad_batches=3)
    assert ema._running.updates == 4
