"""The bare schedulers: those of the factories, counted and stepped right by whoever returns them in a dictionary."""

from __future__ import annotations

import pickle
import weakref
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from torch.optim.lr_scheduler import LRScheduler

import lightning_tricks as lt
from lightning_tricks import schedules
from lightning_tricks.core.fit_start import active
from lightning_tricks.schedules import lr_scheduler
from tests.nets import Net, SaveAt, build, fit, trainer
from tests.refusals import assert_refused
from tests.schedules.recording import FACTORIES, RecordingSGD, Tiny, lrs_of, ones, optimizer

NAMES = [factory.__name__ for factory in FACTORIES]


class Template(Tiny):
    """``configure_optimizers`` of lightning-hydra-template: it says "epoch", whatever the scheduler counts."""

    def __init__(self, optimizer: Any, scheduler: Any, **entries: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.entries = {"monitor": "val/loss", "interval": "epoch", "frequency": 1, **entries}

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is not None:
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.entries}}
        return {"optimizer": optimizer}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))


def from_hydra(name: str, **settings: Any) -> Template:
    config = {
        "_target_": "tests.schedules.test_lr_scheduler.Template",
        "optimizer": {"_target_": "tests.schedules.recording.RecordingSGD", "_partial_": True, "lr": 1.0},
        "scheduler": {"_target_": f"lightning_tricks.lr_scheduler.{name}", "_partial_": True, **settings},
    }
    return instantiate(OmegaConf.create(config))


def lrs(module: L.LightningModule, **settings: Any) -> list[float]:
    run = trainer(**{"max_epochs": 3, **settings})
    run.fit(module, ones(10), ones(2) if isinstance(module, Template) else None)
    return run.optimizers[0].lrs


def returned(name: str, **settings: Any) -> Tiny:
    factory = getattr(schedules, name)
    return Tiny(lambda _, module: factory(RecordingSGD(module.parameters(), lr=1.0), module, **settings))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", NAMES)
def test_a_module_made_by_hydra_has_the_learning_rates_of_one_that_returns_the_dictionary(name):
    settings = {"warmup": 0.2, "floor": 0.01}
    assert lrs(from_hydra(name, **settings)) == lrs(returned(name, **settings))


@pytest.mark.parametrize("run", [{"accumulate_grad_batches": 3}, {"max_epochs": -1, "max_steps": 13}], ids=str)
def test_optimizer_steps_are_counted_as_the_trainer_takes_them(run):
    assert lrs(from_hydra("linear"), **run) == lrs(returned("linear"), **run)


def test_lists_and_given_totals_come_through_hydra_too():
    for name, settings in (("step_decay", {"milestones": [0.25, 20]}), ("one_cycle", {"initial": 0.1})):
        ours = lrs(from_hydra(name, **settings, total_steps=30))
        assert ours == lrs(returned(name, **settings, total_steps=30))
        assert len(set(ours)) > 2


def test_a_plateau_is_stepped_by_validations_with_the_metric_of_the_dictionary():
    settings = {"patience": 0, "factor": 0.5, "threshold": 10.0, "warmup": 3}  # no metric is ten times better
    module = from_hydra("reduce_on_plateau", **settings)
    assert lrs(module) == pytest.approx([1 / 3, 2 / 3, *[1.0] * 8, *[0.5] * 10, *[0.25] * 10])
    module = from_hydra("reduce_on_plateau", **settings)
    assert lrs(module, check_val_every_n_epoch=2) == pytest.approx([1 / 3, 2 / 3, *[1.0] * 18, *[0.5] * 10])


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_it_goes_on_where_the_checkpoint_was(tmp_path: Path):
    whole = lrs(from_hydra("cosine", warmup=0.2), callbacks=[SaveAt(tmp_path / "mid.ckpt", step=14)])
    again = from_hydra("cosine", warmup=0.2)
    run = trainer(max_epochs=3)
    run.fit(again, ones(10), ones(2), ckpt_path=tmp_path / "mid.ckpt", weights_only=False)
    assert run.optimizers[0].lrs == whole[14:]


def test_it_is_among_the_active_tricks():
    run = fit(build(type("Bare", (Net,), {"configure_optimizers": _bare_cosine})), callbacks=[lt.EMA()])
    assert [name for name, _ in active(run)] == ["EMA", "cosine"]
    assert run.lr_scheduler_configs[0].interval == "step"


def _bare_cosine(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler.cosine(optimizer)}}


def test_the_dictionary_of_a_factory_keeps_the_interval_that_its_user_gives_it():
    def by_epochs(_: Any, module: Any) -> Any:
        schedule = schedules.linear(RecordingSGD(module.parameters(), lr=1.0), total_steps=4)
        schedule["lr_scheduler"]["interval"] = "epoch"
        return schedule

    assert lrs(Tiny(by_epochs)) == [*[1.0] * 10, *[0.75] * 10, *[0.5] * 10]


class Early(Tiny):
    """Makes optimizer and scheduler before there is a Trainer, and returns them as ``returns`` says."""

    def __init__(self, returns: Any, make: Any = lr_scheduler.linear) -> None:
        super().__init__()
        self.own = RecordingSGD(self.parameters(), lr=1.0)
        self.scheduler, self.returns = make(self.own, total_steps=30), returns

    def configure_optimizers(self) -> Any:
        return self.returns(self.own, self.scheduler)


RETURNED = {
    "lists": lambda optimizer, scheduler: ([optimizer], [scheduler]),
    "bare": lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": scheduler},
    "epoch": lambda optimizer, scheduler: {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "frequency": 2},
    },
}
FALLS = [1 - step / 30 for step in range(30)]


@pytest.mark.parametrize("callbacks", [[], [lt.EMA]], ids=["plain", "EMA"])
@pytest.mark.parametrize("returns", RETURNED)
def test_one_that_knows_of_no_trainer_is_stepped_with_the_optimizer_too(returns, callbacks):
    module = Early(RETURNED[returns])
    assert lrs(module, callbacks=[each() for each in callbacks]) == pytest.approx(FALLS)
    assert module.scheduler.last_epoch == 30


def test_so_it_is_in_every_fit_and_with_accumulation():
    module = Early(RETURNED["lists"])
    lrs(module, max_epochs=1)
    assert lrs(module, max_epochs=2, accumulate_grad_batches=5) == pytest.approx(FALLS[:14])


def test_the_trainer_is_found_by_a_function_that_is_no_method():
    def configured(net: Any) -> Any:
        optimizer = RecordingSGD(net.parameters(), lr=1.0)
        return [optimizer], [lr_scheduler.linear(optimizer)]

    module = Tiny(lambda _, module: configured(module))
    module.configure_optimizers = partial(configured, module)
    assert lrs(module) == pytest.approx(FALLS)


@pytest.mark.parametrize("tail", [False, True])
def test_one_whose_steps_were_counted_takes_them_however_it_is_returned(tail):
    def extracted(optimizer: Any, module: Any) -> Any:
        schedule = schedules.linear(optimizer, module)
        schedule = schedules.swa_tail(schedule, start=1.0, swa_lr=0.5, anneal=0) if tail else schedule
        return [optimizer], [schedule["lr_scheduler"]["scheduler"]]

    assert lrs(Tiny(extracted)) == pytest.approx(FALLS)


@pytest.mark.parametrize("returns", RETURNED)
def test_epochs_are_no_steps(returns):
    module = Early(RETURNED[returns], partial(_steps, 3))
    with pytest.raises(MisconfigurationException, match=r"number of optimizer steps, got 3, the number of epochs"):
        lrs(module)
    assert module.own.lrs == [], "before the first step"
    assert lrs(Early(RETURNED[returns], partial(_steps, 3)), accumulate_grad_batches=10) == FALLS[::10]


def _steps(count: int, optimizer: Any, total_steps: int) -> LRScheduler:
    return lr_scheduler.linear(optimizer, total_steps=count)


def test_a_plain_loop_may_step_it_with_epochs():
    bare = optimizer(1.0)
    scheduler = lr_scheduler.linear(bare, total_steps=4)
    for _ in range(2):
        for _ in range(5):
            bare.step()
        scheduler.step()
    assert bare.param_groups[0]["lr"] == 0.5


def test_nothing_of_a_plain_loop_is_kept():
    net = torch.nn.Linear(2, 2)
    own = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = lr_scheduler.linear(own, total_steps=4)
    for _ in range(2):
        out = net(torch.ones(1, 2))
        out.sum().backward()
        kept = weakref.ref(out)
        own.step()
        scheduler.step()
        del out
        assert kept() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_loop_steps_it_itself(name):
    bare, dictionary = (optimizer(0.5, 0.25) for _ in range(2))
    scheduler = getattr(lr_scheduler, name)(bare, total_steps=12, warmup=3)
    assert isinstance(scheduler, LRScheduler)
    schedule = getattr(schedules, name)(dictionary, total_steps=12, warmup=3)
    theirs = lrs_of(schedule, 14)
    assert lrs_of({"optimizer": bare, "lr_scheduler": {"scheduler": scheduler}}, 14) == theirs


def test_every_factory_is_there_with_its_own_arguments():
    functions = {name for name in vars(lr_scheduler) if hasattr(getattr(lr_scheduler, name), "__wrapped__")}
    factories = {*NAMES, "swa_tail", "reduce_on_plateau"}
    assert functions == factories
    for name in factories:
        bare, factory = getattr(lr_scheduler, name), getattr(schedules, name)
        assert [*signature(bare).parameters] == [*signature(factory).parameters]
        assert signature(bare).return_annotation == "LRScheduler"
    tail = lr_scheduler.swa_tail(schedules.cosine(optimizer(), total_steps=10), swa_lr=0.5)
    assert tail.curve(9) == 0.5


def test_it_is_pickled_by_its_name():
    made = partial(lr_scheduler.cosine, warmup=0.1)
    assert pickle.loads(pickle.dumps(made)).func is lr_scheduler.cosine


def test_a_total_that_nobody_knows_is_asked_for():
    cases = [
        (schedules.UnknownTotalSteps, {}, "neither module nor total_steps was given"),
        (TypeError, {"total_steps": 10, "cycles": 3}, "unexpected keyword argument 'cycles'"),
    ]
    assert_refused(partial(lr_scheduler.cosine, optimizer()), cases)
