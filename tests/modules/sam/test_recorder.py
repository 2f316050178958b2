"""A recorded step gives the same loss when it runs again."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.replay.own_batch import with_own_batch
from lightning_tricks.core.replay.rerun import run_number
from lightning_tricks.modules.sam.recorder import RecordedStep, StepRecorder
from tests.nets import Net, PlainNet, build, fit


class Again(Callback):
    """Runs each step again in ``on_before_backward``; notes both losses."""

    def __init__(self) -> None:
        self.recorder = StepRecorder()
        self.losses: list[tuple[float, float]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.recorder.start(trainer, pl_module, lambda: trainer.global_step != 3)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        step = self.recorder.take()
        if step is None:
            self.losses.append((0.0, 0.0))
            return
        with torch.no_grad(), step.start.running():
            self.losses.append((loss.item(), step.run().item()))
        assert self.recorder.step is None

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
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


class Records(Callback):
    """Records each step; notes what was recorded, and the number of its run."""

    def __init__(self, gradients: bool = True, before: Any = None) -> None:
        self.recorder, self.gradients, self.before = StepRecorder(), gradients, before
        self.steps: list[RecordedStep | None] = []
        self.numbers: list[int] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.recorder.start(trainer, pl_module, lambda: True, gradients=self.gradients)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, number: int) -> None:
        if self.before is not None:
            self.before(trainer, batch, number)
            assert self.recorder.step is None

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(self.recorder.take())
        self.numbers.append(run_number())

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.recorder.stop()


def test_each_recorded_step_is_a_run_of_its_own_and_one_without_gradients_is_somebody_elses() -> None:
    def score(trainer: L.Trainer, batch: Any, number: int) -> None:
        with torch.no_grad():
            trainer.strategy.training_step(batch, number)

    records = Records(before=score)
    fit(build(Net), callbacks=[records], max_epochs=1)
    assert None not in records.steps
    assert len(set(records.numbers)) == len(records.numbers) == 6


def test_without_gradients_a_step_makes_no_graph() -> None:
    seen: list[bool] = []

    class Seeing(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            seen.append(loss.requires_grad)
            return loss.detach().requires_grad_()

    fit(build(Seeing), callbacks=[Records(gradients=False)], max_epochs=1, limit_train_batches=2)
    assert seen == [False, False]


class Writes(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


class WritesData(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].data.mul_(2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Writes, WritesData])
def test_a_step_that_cannot_be_run_again_is_refused(kind: type[Net]) -> None:
    with pytest.raises(MisconfigurationException, match="writes into its batch"):
        fit(build(kind), callbacks=[Records()])


class Decays(PlainNet):
    """Decays a weight in place, and another one through its ``.data``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.layers[0].bias.mul_(0.9)
        self.layers[0].weight.data.mul_(0.9)
        return super().training_step(batch, batch_idx)


def test_the_state_of_a_step_knows_what_it_has_written() -> None:
    records = Records()
    fit(build(Decays), callbacks=[records], max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    assert records.steps[0] is not None
    state = records.steps[0].start.state
    assert state.written() == "Decays.layers.0.weight"
    with pytest.raises(MisconfigurationException, match=r"parameter layers\.0\.bias"):
        state.refuse_writes()


class Slopes(PlainNet):
    """A penalty on the gradient of its inputs, from the second batch on; logs before and behind it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(self(x), y)
        self.log("task", loss, on_epoch=True)
        if batch_idx:
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        self.log("all", loss, on_epoch=True)
        return {"loss": loss} if batch_idx == 2 else loss


def test_a_step_that_differentiates_inside_has_gradients_there_and_logs_once() -> None:
    logged, losses = [], []

    class Losses(Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            weights = list(module.parameters())
            assert torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True) == (None,) * len(weights)
            losses.append(loss.item())

    class Watched(Slopes):
        def log(self, name: str, value: Any, **settings: Any) -> None:
            logged.append(name)
            super().log(name, value, **settings)

    few: dict[str, Any] = {"limit_val_batches": 0, "max_epochs": 1, "limit_train_batches": 3}
    plain = fit(build(Slopes, lr=0.0), **few)
    run = fit(build(Watched, lr=0.0), callbacks=[Records(gradients=False), Losses()], **few)
    assert logged == ["task", "all"] * 3
    assert run.callback_metrics == plain.callback_metrics
    assert losses[-1] == run.callback_metrics["all_step"]


def test_a_run_again_has_a_batch_of_its_own() -> None:
    batch = {"x": torch.ones(2), "deep": [1, 2]}
    run = with_own_batch(partial(lambda b, *, more: (b, more), batch, more=batch))
    batch["deep"].pop()
    batch.clear()
    for got in run():
        assert torch.equal(got["x"], torch.ones(2))
        assert got["deep"] == [1, 2]
