"""Doctor warns once, and can be silenced rule by rule."""

from __future__ import annotations

import os
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

import lightning_tricks as lt
from lightning_tricks.advisor.doctor import lint, lint_training
from tests.device.nccl import rank_with_nccl
from tests.few import few
from tests.nets import Net, PlainNet, build, data, fit, loader, rank_loader
from tests.ranks import run_ranks


class Reused(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        tanh = nn.Tanh()
        self.layers = nn.Sequential(nn.Linear(8, 16), tanh, nn.Linear(16, 16), tanh, nn.Linear(16, 2))


def test_it_warns_with_the_rule_and_the_remedy() -> None:
    with pytest.warns(UserWarning, match=r"Doctor, reused-modules: one Tanh is used at layers.1, layers.3.* Create"):
        fit(build(Reused), callbacks=[lt.Doctor()], max_epochs=1)


def test_a_silenced_rule_is_not_heard() -> None:
    fit(build(Reused), callbacks=[lt.Doctor(silence=["reused-modules"])], max_epochs=1)  # warnings are errors


def test_what_is_compiled_stays_so() -> None:
    compiled = lt.Compile("layers", backend="eager")
    module = build(Reused)
    fit(module, callbacks=[compiled, lt.Doctor("reused-modules")], max_epochs=1)  # a fallback would warn
    assert not compiled._eager


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"silence must be one of 'reused-modules', .* Did you mean 'sync-dist'\?"):
        lt.Doctor(silence=["sync_dist"])


class Synced(PlainNet):
    settings: dict[str, Any] = {}  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"synced": loss, "again": loss}, **self.settings)
        return loss


def heard_of_logs(settings: dict[str, Any], silence: tuple[str, ...]) -> list[str]:
    return heard(type("Logs", (Synced,), {"settings": settings}), silence)


def heard(kind: type[PlainNet], silence: tuple[str, ...] = (), train: Any = None, **settings: Any) -> list[str]:
    module = build(kind)
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, **settings}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, train=train or rank_loader(), callbacks=[lt.Doctor(silence)], **settings)
    assert not {"log", "all_gather"} & vars(module).keys()
    return [str(each.message) for each in caught if "Doctor" in str(each.message)]


@pytest.mark.parametrize(
    ("settings", "silence", "count"),
    [
        ({"sync_dist": True}, (), 1),
        ({"sync_dist": True}, ("sync-dist",), 0),
        ({"sync_dist": True, "on_step": False, "on_epoch": True}, (), 0),
        ({}, (), 0),
    ],
)
def test_synchronized_logging_in_the_step_is_heard_once_on_rank_zero(
    settings: dict[str, Any], silence: tuple[str, ...], count: int
) -> None:
    first, second = run_ranks(heard_of_logs, settings, silence)
    assert len(first) == count
    assert second == []
    if count:
        assert "Doctor, sync-dist: self.log('synced', sync_dist=True) in training_step" in first[0]


class Gathering(PlainNet):
    sync_grads = detached = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        self.all_gather({"z": z.detach() if self.detached else z}, sync_grads=self.sync_grads)
        self.all_gather(batch[1])
        return super().training_step(batch, batch_idx)


def of_gathers() -> list[list[str]]:
    kinds = [Gathering, *(type("Right", (Gathering,), {name: True}) for name in ("sync_grads", "detached"))]
    return [heard(kind) for kind in kinds]


def test_gathers_that_cut_the_graph_are_heard_once() -> None:
    (wrong, synced, detached), _ = run_ranks(of_gathers)
    assert len(wrong) == 1
    assert "Doctor, gather-gradients: self.all_gather(...) in training_step" in wrong[0]
    assert "sync_grads=True" in wrong[0]
    assert synced == detached == []


def of_samplers() -> list[list[str]]:
    rank = int(os.environ["RANK"])
    batches = BatchSampler(SequentialSampler(data(48)), 8, drop_last=False)
    custom, stock = DataLoader(data(48), batch_sampler=batches), DataLoader(data(48), 8)
    return [
        heard(PlainNet, train=custom),
        heard(PlainNet, silence=("same-samples",), train=custom),
        heard(PlainNet, train=stock, use_distributed_sampler=True),
        heard(PlainNet, train=rank_loader()),
        heard(PlainNet, train=shuffled(data(48), rank)),
        heard(PlainNet, train=shuffled(rank_loader().dataset, rank)),
        heard(PlainNet, train=DataLoader(data(48), 8, sampler=lt.LengthBuckets(range(48), 8))),
    ]


def shuffled(samples: Any, seed: int) -> DataLoader[Any]:
    """In another order on every rank, as of processes that were not seeded alike."""
    return DataLoader(samples, 8, shuffle=True, generator=torch.Generator().manual_seed(seed))


def test_samplers_that_give_all_ranks_the_same_samples_are_heard() -> None:
    (same, silenced, distributed, own, shuffles, shuffles_own, buckets), _ = run_ranks(of_samplers)
    assert len(shuffles) == 1
    assert "Doctor, same-samples: each of 2 ranks shuffles all samples for itself" in shuffles[0]
    assert "an epoch has every sample 2 times. Leave use_distributed_sampler" in shuffles[0]
    assert shuffles_own == buckets == []
    assert len(same) == 1
    assert "Doctor, same-samples: the first batch of all 2 ranks has the same samples" in same[0]
    assert silenced == distributed == own == []


def of_a_device() -> list[list[str]]:
    """The same without float64 on the device, as on some of Intel's."""
    with rank_with_nccl(lacks=[torch.float64]):
        settings = {"accelerator": "cuda", "silence": ("pinned-memory",)}
        return [
            heard(PlainNet, train=DataLoader(data(48), 8), **settings),
            heard(PlainNet, train=rank_loader(), **settings),
        ]


def test_the_samples_of_ranks_are_compared_on_any_device() -> None:
    (same, own), _ = run_ranks(of_a_device)
    assert "Doctor, same-samples: the first batch of all 2 ranks has the same samples" in same[0]
    assert own == []


# -- each lint finds what it is for, says what to do, and is silent where all is well ---------------------------------


def found(module: Any, **settings: Any) -> dict[str, str]:
    """The findings when training starts."""
    findings: dict[str, str] = {}

    def look(trainer: Any, module: Any) -> None:
        findings.update([*lint(module), *lint_training(module, trainer)])

    fit(
        module, callbacks=[LambdaCallback(on_train_start=look)], **{"max_epochs": 1, "limit_val_batches": 0, **settings}
    )
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
    "CurveLR": lambda optimizer, length: lt.cosine(optimizer, total_steps=length)["lr_scheduler"]["scheduler"],
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


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup])
def test_a_warm_up_of_transformers_that_is_stepped_by_epochs(make: Any) -> None:
    said = found(scheduled(partial(make, num_warmup_steps=40, num_training_steps=160), "epoch"), **EPOCHS)
    assert "LambdaLR needs 40 steps and gets 8" in said["schedule-interval"]


@pytest.mark.few(2)
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
