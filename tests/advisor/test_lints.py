"""Each lint finds what it is for, says what to do, and is silent where all is well."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

import lightning_tricks as lt
from lightning_tricks.advisor.doctor import lint, lint_training
from tests.few import few
from tests.nets import Net, PlainNet, build, data, fit, loader


def found(module: Any, **settings: Any) -> dict[str, str]:
    """The findings when training starts."""
    findings: dict[str, str] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            findings.update([*lint(pl_module), *lint_training(pl_module, trainer)])

    fit(module, callbacks=[Look()], **{"max_epochs": 1, "limit_val_batches": 0, **settings})
    return findings


@pytest.mark.parametrize("module", [Net, PlainNet])
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 4}, {"precision": "bf16-mixed"}], ids=str)
def test_nothing_is_found_where_all_is_well(module: Any, settings: dict[str, Any]) -> None:
    assert found(build(module), **settings) == {}


def test_a_dropout_at_two_places() -> None:
    dropout = nn.Dropout(0.1)
    model = nn.Sequential(nn.Linear(2, 2), dropout, nn.Sequential(nn.Linear(2, 2), dropout), nn.ReLU())
    ((rule, text),) = lint(model)
    assert rule == "reused-modules"
    assert "one Dropout is used at 1, 2.1:" in text
    assert lint(nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Dropout())) == []
    aliased = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    aliased["again"] = aliased["encoder"]
    assert lint(aliased) == []
    tied = nn.Linear(2, 2)
    assert lint(nn.Sequential(tied, nn.ReLU(), tied)) == []  # shared weights are meant


def test_biases_before_batchnorm() -> None:
    ((rule, text),) = lint(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)))
    assert rule == "redundant-biases"
    assert "cancels 0.bias" in text
    assert lint(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))) == []


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_bf16_model_in_fp16(name: str) -> None:
    def fp16() -> dict[str, Any]:
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))]}

    module = build(PlainNet)
    assert found(module, **fp16()) == {}
    module.layers.config = SimpleNamespace(**{name: torch.bfloat16})
    assert (
        "layers was pretrained in bf16 and trains with precision='16-mixed'"
        in found(module, **fp16())["bf16-weights-in-fp16"]
    )
    assert found(build(PlainNet), precision="bf16-mixed") == {}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_workers_and_pinned_memory() -> None:
    findings: dict[str, str] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.train_dataloader.num_workers = 500  # none is started
            findings.update([*lint(pl_module), *lint_training(pl_module, trainer)])
            trainer.train_dataloader.num_workers = 0

    train = DataLoader(data(), 8, pin_memory=True)
    fit(build(PlainNet), train=train, callbacks=[Look()], max_epochs=1)
    assert "num_workers=500 in each of 1 processes" in findings["loader-workers"]
    assert "Leave it out" in findings["pinned-memory"]


class Cycle(PlainNet):
    total, interval = 6, "step"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using 'interval'")  # Lightning sees that one, too
@pytest.mark.parametrize(
    ("interval", "settings", "given"),
    [("step", {}, None), ("step", {"accumulate_grad_batches": 4}, 2), ("epoch", {}, 1), ("step", {"max_steps": 3}, 3)],
)
def test_a_schedule_of_another_length(interval: str, settings: dict[str, Any], given: int | None) -> None:
    module = build(type("Once", (Cycle,), {"interval": interval}))
    findings = found(module, train=loader(), **settings)
    if given is None:
        assert findings == {}
    else:
        assert (
            f"OneCycleLR is made for 6 steps, and interval='{interval}' gives it {given}."
            in findings["schedule-length"]
        )


def test_a_training_of_unknown_length_is_not_judged() -> None:
    assert found(build(Cycle), train=iter(list(loader()))) == {}
    by_epochs = build(type("Epochs", (Cosine,), {"interval": "epoch"}))
    assert found(by_epochs, max_epochs=-1, max_steps=3) == {}
    assert found(build(Cosine), fast_dev_run=True) == {}


class Cosine(Cycle):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def scheduled(make: Any, interval: str) -> Any:
    class Scheduled(PlainNet):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": interval}}

    return build(Scheduled)


torch_schedules = torch.optim.lr_scheduler
COUNTS = {
    "LinearLR": lambda optimizer, length: torch_schedules.LinearLR(optimizer, 0.01, total_iters=length),
    "PolynomialLR": lambda optimizer, length: torch_schedules.PolynomialLR(optimizer, length),
    "MultiStepLR": lambda optimizer, length: torch_schedules.MultiStepLR(optimizer, [length // 2, length]),
    "LambdaLR": lambda optimizer, length: get_linear_schedule_with_warmup(optimizer, 0, length),
}


EPOCHS = {"max_epochs": 8, "train": loader(160)}


@pytest.mark.parametrize("name", few(COUNTS, 1))
def test_a_schedule_stepped_by_the_wrong_interval(name: str) -> None:
    by_steps, by_epochs = (partial(COUNTS[name], length=length) for length in (120, 8))
    said = found(scheduled(by_steps, "epoch"), **EPOCHS)["schedule-interval"]
    assert f"{name} needs 120 steps and gets 8, one an epoch" in said
    assert "interval='step'" in said
    said = found(scheduled(by_epochs, "step"), **EPOCHS)["schedule-interval"]
    assert f"{name} ends after 8 of 160 optimizer steps, as if it counted the 8 epochs" in said
    assert found(scheduled(by_steps, "step"), **EPOCHS) == found(scheduled(by_epochs, "epoch"), **EPOCHS) == {}


@pytest.mark.parametrize("make", [get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup])
def test_a_warm_up_of_transformers_that_is_stepped_by_epochs(make: Any) -> None:
    said = found(scheduled(partial(make, num_warmup_steps=40, num_training_steps=160), "epoch"), **EPOCHS)
    assert "LambdaLR needs 40 steps and gets 8" in said["schedule-interval"]


@pytest.mark.parametrize("factor", [lambda e: 0.95**e, lambda e: 1 / (1 + e), lambda e: min(1.0, (e + 1) / 4)])
def test_a_schedule_by_epochs_is_not_judged(factor: Any) -> None:
    assert found(scheduled(partial(torch_schedules.LambdaLR, lr_lambda=factor), "epoch"), **EPOCHS) == {}


def test_a_schedule_that_does_not_tell_its_length_is_not_judged() -> None:
    decay = scheduled(lambda optimizer: torch_schedules.LambdaLR(optimizer, lambda t: max(0.0, 1 - t / 160)), "step")
    table = scheduled(lambda optimizer: torch_schedules.LambdaLR(optimizer, lambda e: [1, 0.5, 0.1][e]), "epoch")
    assert found(decay, max_epochs=8, train=loader(160)) == found(table, max_epochs=2, train=loader(160)) == {}


class HeadOnly(PlainNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers[-1].parameters(), lr=0.1)


def test_parameters_that_no_optimizer_holds() -> None:
    said = found(build(HeadOnly))["forgotten-parameters"]
    assert "holds layers.0.weight, layers.0.bias" in said
    module = build(HeadOnly)
    module.layers[:-1].requires_grad_(False)
    assert found(module) == {}


def test_frozen_parameters_in_an_optimizer() -> None:
    module = build(PlainNet)
    module.layers[0].requires_grad_(False)
    said = found(module)["frozen-parameters"]
    assert said.startswith("SGD holds layers.0.weight, layers.0.bias, which are frozen and never train.")


def test_unless_a_callback_is_to_unfreeze_them() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(build(PlainNet), callbacks=[lt.GradualUnfreeze([3], parameters=[r"^layers\.0"]), lt.Doctor()])
    assert not [each for each in caught if "Doctor" in str(each.message)]
