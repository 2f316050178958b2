"""Steps on trial: what they log, draw and change is gone afterwards, whatever happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

import lightning_tricks as lt
from lightning_tricks.core.lightning.trainer import step_arguments
from lightning_tricks.core.replay.trial import trial_steps
from tests.nets import Net, NormNet, PlainNet, assert_equal, build, fit, loader, trainer, weights

DRAWS: tuple[Callable[[], float], ...] = (lambda: torch.rand(()).item(), numpy.random.rand, random.random)


class Loud(Net):
    """Logs in every way, draws from every generator, and changes what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.outputs, self.calls = MulticlassAccuracy(num_classes=2), list[float](), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * sum(draw() for draw in DRAWS))
        self.accuracy(self(batch[0]), batch[1])
        self.log_dict({"accuracy": self.accuracy, "loss": loss})
        self.calls += 1
        self.outputs.append(loss.item())
        if self.trainer.loggers:
            self.logger.log_metrics({"by hand": loss.item()})
            self.logger.experiment.add_scalar("by hand", loss.item())
        return loss


class Logger(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((metrics, step))


class Trials(Callback):
    """Makes a trial before each step, which ends in an exception if it is to fail."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.losses = fails, list[float]()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, number: int) -> None:
        before, loggers = dict(vars(pl_module)), trainer.loggers
        planned = pytest.raises(ValueError, match="planned") if self.fails else nullcontext()
        with planned, trial_steps(trainer, pl_module):
            loss = trainer.strategy.training_step(*step_arguments(pl_module, batch, number))
            assert not loss.requires_grad
            assert all(logger not in trainer.loggers for logger in loggers)
            assert len(trainer.loggers) == len(loggers)
            self.losses.append(loss.item())
            pl_module.extra, pl_module.calls, pl_module.accuracy = 1, "many", None
            pl_module.eval()
            if self.fails:
                raise ValueError("planned")
        assert torch.is_grad_enabled()
        assert trainer.loggers == loggers
        assert vars(pl_module).keys() == before.keys()
        assert all(layer.training for layer in pl_module.modules())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("loggers", [0, 2])
def test_everything_is_as_if_there_had_been_no_trial(fails: bool, loggers: int) -> None:
    ended = []
    for trials in ([Trials(fails)], []):
        module, own = build(Loud), [Logger() for _ in range(loggers)]
        run = fit(module, callbacks=trials, logger=own, log_every_n_steps=1)
        left = [draw() for draw in DRAWS]
        ended.append((run.callback_metrics, [each.lines for each in own], left, module.outputs, module.calls))
        ended.append(weights(module))
        if trials:
            assert trials[0].losses == module.outputs  # the step drew what its trial drew
            assert "log" not in vars(module)
    assert ended[0] == ended[2]
    assert_equal(ended[1], ended[3])


def test_a_log_method_of_the_users_is_kept() -> None:
    names: list[str] = []
    module = build(Net)
    module.log = lambda name, *_, **__: names.append(name)
    fit(module, callbacks=[Trials(False)], max_epochs=1, limit_val_batches=0)
    assert names == ["train_loss"] * 6


class Unnumbered(PlainNet):
    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch, 0)


class Named(PlainNet):
    def training_step(self, data: Any, batch_idx: int = 0) -> Tensor:
        return super().training_step(data, batch_idx)


class Anything(PlainNet):
    def training_step(self, *args: Any) -> Tensor:
        return super().training_step(*args)


@pytest.mark.parametrize(("kind", "number"), [(Net, True), (Unnumbered, False), (Named, True), (Anything, True)])
def test_a_step_gets_the_arguments_that_lightning_gives_it(kind: type[Net], number: bool) -> None:
    batch = [torch.zeros(2, 8), torch.zeros(2).long()]
    assert step_arguments(build(kind), batch, 5) == ((batch, 5) if number else (batch,))
    fit(build(kind), callbacks=[Trials(False)], max_epochs=1, limit_val_batches=0)


class Noisy(L.LightningDataModule):
    """Counts the batches that it has moved, and scales each of them by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = {"batches": 0}

    def train_dataloader(self) -> Any:
        return loader(16)

    def val_dataloader(self) -> Any:
        return loader(16)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.moved["batches"] += 1
        return batch[0] * (1 + 0.1 * self.moved["batches"]), batch[1]


@pytest.mark.parametrize("trick", [lambda: lt.LogitAdjustment(tau=0.0), lambda: lt.SWA(start=1)], ids=["labels", "SWA"])
def test_a_data_module_is_as_before_when_batches_have_been_read_anew(trick: Any) -> None:
    plain, tricked = (Noisy(), build(NormNet)), (Noisy(), build(NormNet))
    for (data, module), callbacks in ((plain, []), (tricked, [trick()])):
        trainer(callbacks=callbacks, max_epochs=2).fit(module, datamodule=data)
    assert tricked[0].moved == plain[0].moved
    if not isinstance(callbacks[0], lt.SWA):
        assert_equal(weights(tricked[1]), weights(plain[1]))
