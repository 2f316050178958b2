"""GradualUnfreeze equals a loop in which groups join by hand: alone, in two processes, on shards and after a resume."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from lightning_tricks.callbacks.gradual_unfreeze import unfreeze_order
from tests.nets import (
    Net,
    NormNet,
    SaveAt,
    SteppedByHand,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    rank_loader,
    trained,
    weights,
)
from tests.ranks import run_ranks
from tests.refusals import assert_refused
from tests.schedules.recording import SaveEveryStep

GROUPS = [r"^layers\.2\.", r"^layers\.0\."]
SETTINGS: dict[str, Any] = {"at": [3, 0.5], "parameters": GROUPS, "lr_factor": 0.5}
AT = (3, 6)  # of 12 steps
WINDOWS = {"accumulate_grad_batches": 3}
TWELVE: dict[str, Any] = {"train": loader(24), "max_epochs": 4}  # optimizer steps


class Deep(Net):
    """Three layers, Adam, a schedule."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        return lt.cosine(optimizer, self, total_steps=12, warmup=2)


class DeepNorm(Deep):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.layers[1], self.layers[3] = nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)


def by_hand(module: Deep, batches: Any, *, epochs: int = 4, lr_factor: float = 0.5) -> list[list[float]]:
    """An optimizer that is made anew for each group that joins, over a loop; the learning rates of the steps."""
    parts = [module.layers[4], module.layers[2], module.layers[0]]
    optimizers: list[torch.optim.Optimizer] = []
    schedule = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=module.lr)
    curve = lt.cosine(schedule, total_steps=12, warmup=2)["lr_scheduler"]["scheduler"].curve
    rates = []
    for step in range(epochs * len(batches)):
        while len(optimizers) < 3 and step >= (0, *AT)[len(optimizers)]:
            optimizers.append(torch.optim.AdamW(parts[len(optimizers)].parameters(), lr=1.0, weight_decay=0.1))
        x, y = batches[step % len(batches)]
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        rates.append([module.lr * curve(step) * lr_factor**k for k in range(3)])
        for optimizer, rate in zip(optimizers, rates[-1], strict=False):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    return rates


class Watch(Callback):
    """What trains, the learning rates of the groups, and the weights, in each step."""

    def __init__(self) -> None:
        self.trains: list[list[bool]] = []
        self.lrs: list[list[float]] = []
        self.first: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        layers = [pl_module.layers[n] for n in (4, 2, 0)]
        self.trains.append([layer.weight.grad is not None for layer in layers])
        found = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
        self.lrs.append([found[id(layer.weight)] for layer in layers])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.first.append(pl_module.layers[0].weight.detach().clone())


def test_training_equals_groups_that_join_by_hand_and_rates_follow_the_curve() -> None:
    reference, module, watch = build(Deep), build(Deep), Watch()
    rates = by_hand(reference, list(loader(24)))
    fit(module, callbacks=[lt.GradualUnfreeze(**SETTINGS), watch], **TWELVE)
    assert_equal(weights(module), weights(reference))
    assert watch.trains == [[True, step >= 3, step >= 6] for step in range(12)]
    for ours, theirs in zip(watch.lrs, rates, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert all(torch.equal(each, watch.first[0]) for each in watch.first[:6])  # neither decayed nor moved
    assert not torch.equal(watch.first[6], watch.first[5])
    assert all(parameter.requires_grad for parameter in module.parameters())  # again


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_group_joins_between_accumulation_windows(accumulate: int) -> None:
    watch = Watch()
    callbacks = [lt.GradualUnfreeze([1, 3], parameters=GROUPS), watch]
    fit(build(Deep), train=loader(40), callbacks=callbacks, accumulate_grad_batches=accumulate, max_epochs=2)
    assert watch.trains == [[True, step >= 1, step >= 3] for step in range(len(watch.trains))]


def test_epochs_count_when_asked_to() -> None:
    watch = Watch()
    trained(Deep, lt.GradualUnfreeze([1, 3], parameters=GROUPS, unit="epoch"), watch, **TWELVE)
    assert watch.trains == [[True, step >= 3, step >= 9] for step in range(12)]


def test_groups_by_depth() -> None:
    names = [[f"layers.{number}.weight", f"layers.{number}.bias"] for number in (2, 0)]
    assert unfreeze_order(build(Deep), r"^layers\.(\d+)", 2) == names
    by_number = trained(Deep, lt.GradualUnfreeze([2, 4], parameters=r"^layers\.(\d+)"))
    by_pattern = trained(Deep, lt.GradualUnfreeze([2, 4], parameters=GROUPS))
    assert_equal(by_number, by_pattern)


class Modes(Callback):
    def __init__(self) -> None:
        self.seen: list[list[bool]] = []
        self.statistics: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append([pl_module.layers[n].training for n in (1, 3)])
        self.statistics.append(pl_module.layers[1].running_mean.clone())


class Trains(DeepNorm):
    """Calls train() by itself, as older Lightning did."""

    def on_train_epoch_start(self) -> None:
        self.train()


@pytest.mark.parametrize("kind", [DeepNorm, Trains])
def test_batchnorm_of_what_is_frozen_stays_in_eval_mode(kind: type[Deep]) -> None:
    modes, module = Modes(), build(kind)
    callback = lt.GradualUnfreeze([3, 6], parameters=[r"^layers\.2\.", r"^layers\.[01]\."])
    fit(module, callbacks=[callback, modes], **TWELVE)
    assert modes.seen == [[step >= 6, step >= 3] for step in range(12)]
    assert not any(bool(mean.any()) for mean in modes.statistics[:6])
    assert modes.statistics[6].any()
    assert all(each.training for each in module.modules())


class Wrapping(DeepNorm):
    """Wraps its layers when the optimizer is there, which changes the names of their parameters."""

    def on_fit_start(self) -> None:
        for n in range(len(self.layers)):
            self.layers[n] = nn.Sequential(self.layers[n])


def test_modules_may_be_wrapped_later() -> None:
    wrapping, plain = build(Wrapping), build(DeepNorm)
    for module in (wrapping, plain):
        callback = lt.GradualUnfreeze([3, 6], parameters=[r"^layers\.2\.", r"^layers\.[01]\."], lr_factor=0.5)
        fit(module, callbacks=[callback], **TWELVE)
    assert all(map(torch.equal, wrapping.state_dict().values(), plain.state_dict().values()))
    assert len(wrapping.state_dict()) == len(plain.state_dict())
    assert all(each.requires_grad for each in wrapping.parameters())


def test_what_the_user_froze_stays_frozen() -> None:
    module = build(Deep)
    assert lt.freeze(module, r"^layers\.0\.weight") == ["layers.0.weight"]
    before = weights(module)
    fit(module, callbacks=[lt.GradualUnfreeze([1], parameters=[r"^layers\.[02]"])])
    assert torch.equal(before["layers.0.weight"], module.layers[0].weight)
    assert not torch.equal(before["layers.0.bias"], module.layers[0].bias)
    assert not module.layers[0].weight.requires_grad


class Grouped(Deep):
    """Weight decay and a learning rate for each layer."""

    def configure_optimizers(self) -> Any:
        groups = lt.layer_decay_groups(self, self.lr, 0.5, pattern=r"^layers\.(\d+)", weight_decay=0.1)
        return torch.optim.AdamW(groups)


def test_the_optimizers_own_groups_keep_their_settings(tmp_path: Path) -> None:
    class Groups(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.seen = [(g["name"], g["lr"], g["weight_decay"]) for g in trainer.optimizers[0].param_groups]

    groups = Groups()
    callback = lt.GradualUnfreeze([1, 2], parameters=[r"^layers\.2\.weight", r"^layers\.0\."], lr_factor=0.1)
    monitor, logger = LearningRateMonitor("step"), CSVLogger(tmp_path)
    fit(build(Grouped), callbacks=[callback, groups, monitor], logger=logger, log_every_n_steps=1)
    assert {name: (lr, decay) for name, lr, decay in groups.seen} == {
        "depth_0_decay": (0.05, 0.1),
        "depth_0_no_decay": (0.05, 0.0),
        "depth_1_decay": (pytest.approx(0.0025), 0.1),
        "depth_1_no_decay": (0.025, 0.0),
        "depth_2_decay": (pytest.approx(0.000125), 0.1),
        "depth_2_no_decay": (pytest.approx(0.000125), 0.0),
    }


class Plain(Deep):
    """Without a schedule."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


def test_a_schedule_by_callback_is_followed() -> None:
    """LRSchedule is attached after the groups were split."""
    by_callback, by_module = Watch(), Watch()
    schedule = lt.LRSchedule("cosine", warmup=2)
    one = trained(Plain, schedule, lt.GradualUnfreeze(**SETTINGS), by_callback, **TWELVE)
    other = trained(Deep, lt.GradualUnfreeze(**SETTINGS), by_module, **TWELVE)
    assert by_callback.lrs == by_module.lrs
    assert_equal(one, other)


class StepLRNet(Deep):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_schedulers_of_torch_are_followed() -> None:
    watch = Watch()
    trained(StepLRNet, lt.GradualUnfreeze(**SETTINGS), watch, **TWELVE)
    for step, lrs in enumerate(watch.lrs):
        assert lrs == pytest.approx([0.1 * 0.5 ** (step // 2) * 0.5**k for k in range(3)])


class WithBackbone(Deep):
    """As Lightning's BackboneFinetuning wants it; the optimizer has what trains when it is made."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.backbone = self.layers[:4]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=self.lr, momentum=0.9)


def test_one_group_is_what_lightnings_backbone_finetuning_does() -> None:
    reference = BackboneFinetuning(2, lambda epoch: 1.0, backbone_initial_ratio_lr=0.1, verbose=False)
    callback = lt.GradualUnfreeze([2], parameters=[r"^layers\.[0-3]\."], unit="epoch", lr_factor=0.1)
    assert_close(trained(WithBackbone, callback, **TWELVE), trained(WithBackbone, reference, **TWELVE))


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", [Deep, DeepNorm, StepLRNet])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_resume_is_exact_whatever_was_frozen(kind: type[Deep], epoch: int, tmp_path: Path) -> None:
    settings, path, watch = {**SETTINGS, "at": [2, 4]}, tmp_path / "a.ckpt", Watch()
    whole = trained(kind, lt.GradualUnfreeze(**settings), SaveAt(path, epoch=epoch), **TWELVE)
    assert_equal(trained(kind, lt.GradualUnfreeze(**settings), watch, **TWELVE, ckpt_path=path), whole)
    assert watch.trains == [[True, step >= 2, step >= 4] for step in range(3 * epoch + 3, 12)]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # all batches are one
@pytest.mark.parametrize("step", [1, 2, 4, 5])
def test_a_resume_within_an_epoch_is_exact(step: int, tmp_path: Path) -> None:
    batch = next(iter(loader(8)))
    train = DataLoader([(batch[0][n % 8], batch[1][n % 8]) for n in range(24)], batch_size=8)
    settings, watch = {**SETTINGS, "at": [2, 4]}, Watch()
    whole = trained(DeepNorm, lt.GradualUnfreeze(**settings), SaveEveryStep(tmp_path), train=train, max_epochs=4)
    callbacks = [lt.GradualUnfreeze(**settings), watch]
    assert_equal(trained(DeepNorm, *callbacks, train=train, max_epochs=4, ckpt_path=tmp_path / f"{step}.ckpt"), whole)
    assert watch.trains == [[True, now >= 2, now >= 4] for now in range(step, 12)]


def test_a_resume_with_other_groups_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "0.ckpt", lt.GradualUnfreeze([9], parameters=GROUPS[:1])
    trained(Deep, lt.GradualUnfreeze([9, 9], parameters=GROUPS), SaveAt(path, epoch=0), **TWELVE)
    with pytest.raises(MisconfigurationException, match=r"a checkpoint with 4 frozen parameters .* the groups of that"):
        fit(build(Deep), callbacks=[other], max_epochs=4, ckpt_path=path)


def test_an_average_takes_in_what_joins() -> None:
    averaged = trained(Deep, lt.GradualUnfreeze(**SETTINGS), lt.EMA(0.5, at_end="averaged"), **TWELVE)
    raw = trained(Deep, lt.GradualUnfreeze(**SETTINGS), **TWELVE)
    for name, value in averaged.items():
        assert not torch.equal(value, raw[name])
        torch.testing.assert_close(value, raw[name], atol=0.05, rtol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_an_average_before_or_after_it_takes_in_what_joins_with_an_epoch_in_that_epoch(order: int) -> None:
    ema = lt.EMA(0.5, at_end="raw")
    fit(build(Deep), train=loader(24), callbacks=[lt.GradualUnfreeze([3], parameters=[r"^layers\.0"]), ema][::order])
    assert not torch.equal(
        ema.averaged_state_dict()["layers.0.weight"], weights(ema._running.module)["layers.0.weight"]
    )


# -- two ranks ---------------------------------------------------------------------------------------------------------


class ShardedDeep(Deep):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.layers[0], mesh=mesh)
        fully_shard(self.layers, mesh=mesh)


class Wrappers(Callback):
    """The wrappers of DDP that there were."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if not self.found or self.found[-1]() is not trainer.strategy.model:
            self.found.append(weakref.ref(trainer.strategy.model))


class Whole(Callback):
    """The full weights at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(pl_module.layers, nn.Module) and hasattr(pl_module.layers, "reshard"):
            pl_module.layers.reshard()
        state = {name: value.detach() for name, value in pl_module.named_parameters()}
        self.weights = {name: getattr(value, "full_tensor", value.clone)().clone() for name, value in state.items()}


RANKED: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False, "max_epochs": 4}
STRATEGIES: dict[str, tuple[type[Deep], Callable[[], Any]]] = {
    "ddp": (Deep, lambda: "ddp"),
    "views": (Deep, lambda: DDPStrategy(gradient_as_bucket_view=True)),
    "static": (Deep, lambda: DDPStrategy(static_graph=True)),
    "fsdp2": (ShardedDeep, lambda: ModelParallelStrategy(2, 1)),
    "fsdp2 in a file": (ShardedDeep, lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)),
}


def resumed_on_ranks(trick: Callable[[], Callback], kind: Any, strategy: Any, folder: Path) -> dict[str, Any]:
    """The end weights of a fit with a trick that freezes; one that goes on from its checkpoint has the same."""
    wrappers, whole, again = Wrappers(), Whole(), Whole()
    common, path = {"train": rank_loader(), **RANKED}, folder / "1.ckpt"
    callbacks = [trick(), whole, SaveAt(path, epoch=1), wrappers]
    fit(build(kind), strategy=strategy(), callbacks=callbacks, **common)
    if kind is Deep:
        gc.collect()
        assert len(wrappers.found) == 3
        assert [each() for each in wrappers.found[:-1]] == [None, None]  # nothing holds on to their buckets
    fit(build(kind), strategy=strategy(), callbacks=[trick(), again], ckpt_path=path, **common)
    assert_equal(again.weights, whole.weights)
    return whole.weights


def on_two_ranks(folder: Path) -> dict[str, Any]:
    trick = partial(lt.GradualUnfreeze, [2, 9], parameters=GROUPS, lr_factor=0.5)
    told = {name: resumed_on_ranks(trick, *case, folder / name) for name, case in STRATEGIES.items()}
    common = {"strategy": "ddp", "train": rank_loader(), **RANKED}
    trained(DeepNorm, lt.GradualUnfreeze([2, 9], parameters=GROUPS), **common)
    told["windows"] = trained(Deep, lt.GradualUnfreeze([1, 2], parameters=GROUPS), **common, **WINDOWS)
    return told


@pytest.mark.slow
def test_two_ranks_equal_one_process_and_each_other_without_unused_parameters(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, tmp_path)
    common = {"train": loader(48, batch_size=16), "max_epochs": 4}
    alone = trained(Deep, lt.GradualUnfreeze([2, 9], parameters=GROUPS, lr_factor=0.5), **common)
    windows = trained(Deep, lt.GradualUnfreeze([1, 2], parameters=GROUPS), **common, **WINDOWS)
    for name in first:
        assert_equal(first[name], second[name])
        assert_close(first[name], windows if name == "windows" else alone, 1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_mistakes_raise() -> None:
    cases = [
        (TypeError, {"at": []}, "at must be a list of times"),
        (TypeError, {"at": 3}, "at must be a list of times"),
        (ValueError, {"at": [2, 1]}, r"at must be in ascending order, got \[2, 1\]"),
        (ValueError, {"at": [1.5]}, r"at\[0\] must be an int >= 0"),
        (
            ValueError,
            {"at": [1], "parameters": ["a", "b"]},
            "parameters must be as many patterns as at has times, 1, got",
        ),
        (ValueError, {"at": [1], "parameters": ["("]}, "parameters: '\\(' is not a regular expression"),
        (ValueError, {"at": [1], "unit": "batch"}, "unit must be one of 'step', 'epoch'"),
        (ValueError, {"at": [1], "lr_factor": 0}, "lr_factor must be above 0"),
        (TypeError, {"at": [1], "lr_factor": "1"}, "lr_factor must be a number"),
    ]
    assert_refused(lt.GradualUnfreeze, cases)


class OwnSchedule(torch.optim.lr_scheduler.LambdaLR):
    pass


class Unknown(Deep):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [OwnSchedule(optimizer, lambda step: 1.0)]


class HeadOnly(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers[4].parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Deep, {"at": [1], "parameters": [""]}, "needs parameters that train from the start"),
        (Deep, {"at": [1], "parameters": ["nothing"]}, "'nothing' is neither"),
        (
            Deep,
            {"at": [1], "parameters": [r"^layers\.(\d+)"]},
            "each pattern is one group, and .* Give this pattern alone",
        ),
        (Deep, {"at": [1, 2], "parameters": ["layers", "layers.0"]}, "no earlier pattern selects, 'layers.0' selects"),
        (Deep, {"at": [1]}, "must be or hold one timm or Hugging Face model .*else pass parameters, a regex"),
        (Deep, {"at": [1], "parameters": r"^layers"}, "parameters must be found in .* got '.layers'"),
        (
            Deep,
            {"at": [1, 2, 3], "parameters": r"^layers\.(\d+)"},
            "3 times need as many layers below the head, found 2",
        ),
        (Unknown, {"at": [1], "parameters": GROUPS[:1], "lr_factor": 0.5}, r"lr_factor=0.5\): .*, got OwnSchedule"),
        (HeadOnly, {"at": [1], "parameters": GROUPS[:1]}, "must have every parameter that will train, 2 are"),
    ],
)
def test_what_cannot_be_right_is_refused(kind: type[Deep], arguments: dict[str, Any], message: str) -> None:
    module = build(kind)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[lt.GradualUnfreeze(**arguments)])
    assert all(parameter.requires_grad for parameter in module.parameters())


def with_a_state() -> str:
    strategy = DDPStrategy(ddp_comm_state=object())
    with pytest.raises(MisconfigurationException) as caught:
        fit(build(Deep), callbacks=[lt.GradualUnfreeze([1], parameters=GROUPS[:1])], strategy=strategy, devices=2)
    return str(caught.value)


class TwoOptimizers(Deep):
    """The stem has an optimizer and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        head = list(self.layers[-1].parameters())
        stem = [weight for weight in self.parameters() if all(weight is not other for other in head)]
        return [torch.optim.SGD(head, lr=0.1), torch.optim.SGD(stem, lr=0.1)]


def test_a_loss_that_depends_on_frozen_weights_alone_is_told() -> None:
    callback = lt.GradualUnfreeze([2], parameters=[r"layers\.[0-3]"])
    with pytest.raises(MisconfigurationException, match="GradualUnfreeze: this loss has no gradient, as everything"):
        fit(build(TwoOptimizers), callbacks=[callback])


def test_a_communication_hook_with_a_state_is_refused() -> None:
    first, _ = run_ranks(with_a_state)
    assert "communication hook that keeps a state" in first


def test_a_fraction_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"GradualUnfreeze\(at=0.5\) is a fraction of a training whose"):
        fit(build(Manual), callbacks=[lt.GradualUnfreeze([0.5], parameters=[r"^layers\.0\."])])


class Spikes(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (torch.nan if batch_idx == self.at else 1)


@pytest.mark.parametrize("lr_factor", [1.0, 0.5])
@pytest.mark.parametrize("first", [0, 1])
def test_a_group_that_joined_since_a_snapshot_leaves_again_when_training_goes_back(
    first: int, lr_factor: float
) -> None:
    def run(at: int, train: Any, *callbacks: Any) -> Any:
        module = build(Spikes)
        module.at = at
        both = [lt.GradualUnfreeze([0, 3], parameters=GROUPS, lr_factor=lr_factor), *callbacks]
        fit(module, train=train, callbacks=both[:: -1 if first else 1], max_epochs=1)
        return module

    whole = data(80)
    left_out = [sample for sample in range(80) if not 16 <= sample < 32]  # the batches from the snapshot on
    spoiled = run(3, DataLoader(whole, 8), lt.RewindOnSpike(every_n_steps=2))
    assert_equal(weights(spoiled), weights(run(-1, DataLoader(Subset(whole, left_out), 8))))


class Manual(SteppedByHand, NormNet):
    """Steps by itself."""


def test_manual_optimization_unfreezes_as_well() -> None:
    module, groups = build(Manual), [r"^layers\.0\."]
    before = weights(module)
    fit(module, callbacks=[lt.GradualUnfreeze([100], parameters=groups)])
    assert torch.equal(before["layers.0.weight"], module.layers[0].weight)
    fit(module, callbacks=[lt.GradualUnfreeze([4], parameters=groups)])
    assert not torch.equal(before["layers.0.weight"], module.layers[0].weight)
