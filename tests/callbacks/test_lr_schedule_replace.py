"""LRSchedule(replace=True): what a library ships leaves no trace in the learning rates, the momenta or the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.scheduler import CosineLRScheduler
from torch.optim import SGD, lr_scheduler

import lightning_tricks as lt
from tests.nets import Net, PlainNet, assert_equal, build, fit, weights


class Two(PlainNet):
    """Two groups, of which one has settings of its own, and no schedule."""

    def optimizer(self) -> SGD:
        first, last = self.layers[0].parameters(), self.layers[-1].parameters()
        return SGD([{"params": first}, {"params": last, "lr": 0.02, "momentum": 0.5}], lr=0.1, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.optimizer()


class OneCycle(Two):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Lists(Two):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [lr_scheduler.CyclicLR(optimizer, base_lr=0.001, max_lr=3.0)]


class Several(Two):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
        return [optimizer], [warm, lr_scheduler.StepLR(optimizer, 1, gamma=0.1)]


class Plateau(Two):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "train_loss"}


class Timm(Two):
    """Steps the scheduler in a way of its own, which would set back another one."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = CosineLRScheduler(optimizer, t_initial=2, warmup_t=1, warmup_lr_init=1e-5)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


class Rates(Callback):
    """The learning rates and momenta of every step."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[float, float]]] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])


def trained(kind: type[Net], *callbacks: Callback, **settings: Any) -> tuple[list[Any], dict[str, Any]]:
    module, rates = build(kind), Rates()
    fit(module, callbacks=[*callbacks, rates], **settings)
    return rates.seen, weights(module)


SHIPPED = [Two, OneCycle, Lists, Several, Plateau, Timm]


@pytest.mark.parametrize("kind", SHIPPED)
@pytest.mark.parametrize("curve", ["cosine", "reduce_on_plateau"])
def test_it_is_bit_equal_to_a_module_that_ships_no_schedule(kind: type[Net], curve: str) -> None:
    options: dict[str, Any] = {"warmup": 2}
    if curve == "reduce_on_plateau":
        options |= {"monitor": "train_loss", "patience": 0, "threshold": 0.9, "factor": 0.5}
    alone, expected = trained(Two, lt.LRSchedule(curve, **options))
    replaced, given = trained(kind, lt.LRSchedule(curve, **options, replace=True))
    assert replaced == alone
    assert len({lr for step in alone for lr, _ in step}) > 2, "the schedule does something"
    assert_equal(given, expected)


class Named(PlainNet):
    """With an optimizer that adds settings to its groups when it is made, or has a learning rate in a tensor."""

    def __init__(self, name: str, ships: bool) -> None:
        super().__init__()
        self.name, self.ships = name, ships

    def configure_optimizers(self) -> Any:
        optimizer = lt.optimizer(self.name, self, 0.1)
        if not self.ships:
            return optimizer
        return [optimizer], [lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=12)]


@pytest.mark.parametrize("name", ["adamw", "lookahead_sgd", "adamw4bit"])
def test_settings_that_an_optimizer_has_added_stay(name: str) -> None:
    plain, replaced = (build(Named, name=name, ships=ships) for ships in (False, True))
    with torch.compiler.set_stance("force_eager"):
        fit(plain, callbacks=[lt.LRSchedule("cosine")])
        run = fit(replaced, callbacks=[lt.LRSchedule("cosine", replace=True)])
    assert_equal(weights(replaced), weights(plain))
    expected = plain.trainer.optimizers[0].param_groups
    for group, other in zip(run.optimizers[0].param_groups, expected, strict=True):
        assert group.keys() == other.keys()


@pytest.mark.parametrize("kind", SHIPPED[1:])
def test_without_it_the_error_says_so(kind: type[Net]) -> None:
    message = "from configure_optimizers: both set the learning rate.* pass LRSchedule\\(replace=True\\)"
    with pytest.raises(MisconfigurationException, match=message):
        trained(kind, lt.LRSchedule("cosine"))


def test_it_is_resumed_bit_equal(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    _, expected = trained(OneCycle, lt.LRSchedule("cosine", replace=True), saving, enable_checkpointing=True)
    resumed = trained(OneCycle, lt.LRSchedule("cosine", replace=True), ckpt_path=tmp_path / "step=6.ckpt")
    assert_equal(resumed[1], expected)


def test_the_checkpoint_of_the_shipped_schedule_is_refused_by_name(tmp_path: Path) -> None:
    trained(OneCycle, ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1), enable_checkpointing=True)
    with pytest.raises(ValueError, match="state of another kind of scheduler than CurveLR"):
        trained(OneCycle, lt.LRSchedule("cosine", replace=True), ckpt_path=tmp_path / "step=6.ckpt")


class Ready(Two):
    """Its optimizer is there before Lightning asks for it."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.ready = lr_scheduler.OneCycleLR(self.optimizer(), max_lr=1.0, total_steps=12)

    def configure_optimizers(self) -> Any:
        return [self.ready.optimizer], [self.ready]


def test_an_optimizer_that_was_made_before_is_refused_before_the_first_step() -> None:
    module = build(Ready)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"made outside of Ready\.configure_optimizers: make it there"):
        fit(module, callbacks=[lt.LRSchedule("cosine", replace=True)])
    assert_equal(weights(module), before)


def test_nothing_of_it_is_left_in_the_module_or_in_torch() -> None:
    original = torch.optim.Optimizer.add_param_group
    module = build(Timm)
    fit(module, callbacks=[lt.LRSchedule("cosine", replace=True)])
    assert torch.optim.Optimizer.add_param_group is original
    assert not {"configure_optimizers", "lr_scheduler_step"} & vars(module).keys()


def test_beside_a_trick_that_splits_the_groups() -> None:
    unfreeze = {"at": [3], "parameters": [r"^layers\.0"], "lr_factor": 0.5}
    alone, expected = trained(Two, lt.GradualUnfreeze(**unfreeze), lt.LRSchedule("cosine"))
    replaced, given = trained(OneCycle, lt.GradualUnfreeze(**unfreeze), lt.LRSchedule("cosine", replace=True))
    assert replaced == alone
    assert_equal(given, expected)


class OneGroup(PlainNet):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=12)]


@pytest.mark.parametrize(
    "split",
    [
        lambda: lt.LoRA(r"layers\.0", r=2, train=r"layers\.[1-9]", lr_ratio=4.0),
        lambda: lt.GradualUnfreeze([3], parameters=[r"^layers\.0"], lr_factor=0.5),
    ],
    ids=["LoRA", "GradualUnfreeze"],
)
def test_beside_a_trick_that_splits_a_group_in_two(split: Any) -> None:
    alone, expected = trained(PlainNet, split(), lt.LRSchedule("cosine"))
    replaced, given = trained(OneGroup, split(), lt.LRSchedule("cosine", replace=True))
    assert replaced == alone
    assert_equal(given, expected)
