"""DiLoCo: ``ddp_diloco_bf16`` in real processes beside a plain loop over the workers."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from lightning_tricks.strategies.ddp.outer import OuterOptimizer, fragments
from tests.nets import NormNet, PlainNet, SaveAt, assert_close, assert_equal, build, data, fit, weights
from tests.ranks import run_ranks
from tests.strategies.ddp.test_compression import Watching, written

STEPS = 11


class Deep(PlainNet):
    """Four blocks of equal size and a smaller head, AdamW and a schedule."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__(lr)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.layers = nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 2))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# Those of the blocks in turn; the head comes last, when both have two blocks.
FRAGMENTS = (("layers.0.0", "layers.0.2", "layers.1"), ("layers.0.1", "layers.0.3"))


class SharpDeep(lt.SAMMixin, Deep):
    sam = lt.SAM(rho=0.1)


def samples(rank: int, world: int, epochs: bool = False, size: int = 8) -> Any:
    """A rank's batches: 12 in an epoch, or 3."""
    count = 3 if epochs else 12
    mine = [size * world * step + size * rank + n for step in range(count) for n in range(size)]
    return DataLoader(Subset(data(size * world * count), mine), batch_size=size)


def run(kind: type[PlainNet] = Deep, *, epochs: bool = False, **settings: Any) -> tuple[L.Trainer, Any]:
    """A fit of this rank; what DDPPreset takes goes there."""
    names = ("outer_lr", "outer_momentum", "fragments", "local_sgd_period", "compression_start", "precision")
    names += ("find_unused_parameters",)
    given = {name: settings.pop(name) for name in names if name in settings}
    strategy = lt.preset("ddp_diloco_bf16", **{"precision": "32-true", "local_sgd_period": 4, **given})
    world = int(os.environ["WORLD_SIZE"])
    train = samples(int(os.environ["RANK"]), world, epochs)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    where = {"devices": devices, "num_nodes": world // devices}
    defaults = {**where, "use_distributed_sampler": False, "max_steps": STEPS, "max_epochs": -1}
    module = build(kind)
    return fit(module, train=train, **{**defaults, "limit_val_batches": 0, **strategy, **settings}), module


class Workers:
    """The plain loop: workers with optimizers of their own, and the outer step written out for each parameter."""

    def __init__(self, kind: type[PlainNet] = Deep, world: int = 2) -> None:
        self.step, self.modules = 0, [build(kind) for _ in range(world)]
        self.configured = [module.configure_optimizers() for module in self.modules]
        self.last = {name: p.detach().clone() for name, p in self.modules[0].named_parameters()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.last.items()}

    def train(
        self,
        until: int = STEPS,
        *,
        period: int = 4,
        parts: Iterable[tuple[int, tuple[str, ...]]] = ((0, ("",)),),  # steps of a period, and how names begin
        lr: float = 0.7,
        momentum: float = 0.9,
        mean_at: Collection[int] = (STEPS,),
        epochs: bool = False,
        clip: float = 1e9,
        accumulate: int = 1,
        rho: float = 0.0,
        precision: Any = nullcontext,
        size: int = 8,
    ) -> dict[str, Tensor]:
        batches = [list(samples(rank, len(self.modules), epochs, size)) for rank in range(len(self.modules))]
        while self.step < until:
            self.step += 1
            for module, configured, own in zip(self.modules, self.configured, batches, strict=True):
                begin = accumulate * (self.step - 1)
                chosen = [own[number % len(own)] for number in range(begin, begin + accumulate)]
                self._inner(module, configured, chosen, clip, rho, precision)
            for at, names in parts:
                if self.step % period == at:
                    self._outer(names, lr, momentum)
            if self.step in mean_at:
                self._put(self._means())
        return weights(self.modules[0])

    def _inner(
        self, module: Any, configured: Any, chosen: list[list[Tensor]], clip: float, rho: float, precision: Any
    ) -> None:
        """A step of one worker."""
        optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
        optimizer.zero_grad()
        for x, y in chosen:
            moved = [torch.zeros_like(p) for p in module.parameters()]
            if rho:
                loss = F.cross_entropy(module(x), y) / len(chosen)
                gradients = torch.autograd.grad(loss, list(module.parameters()))
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                moved = [rho * gradient / norm for gradient in gradients]
            torch._foreach_add_([p.data for p in module.parameters()], moved)
            with precision():
                loss = F.cross_entropy(module(x), y) / len(chosen)
            loss.backward()
            torch._foreach_sub_([p.data for p in module.parameters()], moved)
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if isinstance(configured, dict):
            configured["lr_scheduler"]["scheduler"].step()

    def _means(self) -> dict[str, Tensor]:
        every = [dict(module.named_parameters()) for module in self.modules]
        return {name: sum(named[name].detach() / len(every) for named in every) for name in self.last}

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if name in values:
                    parameter.data.copy_(values[name])

    def _outer(self, names: tuple[str, ...], lr: float, momentum: float) -> None:
        for name, mean in self._means().items():
            if name.startswith(names):
                gradient = self.last[name] - mean
                self.momentum[name] = momentum * self.momentum[name] + gradient
                self.last[name] = self.last[name] - lr * (gradient + momentum * self.momentum[name])
                self._put({name: self.last[name]})


class Freezes(Callback):
    """Freezes the blocks amid a period, with weights of each rank's own."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 5:
            self.weight = next(pl_module.parameters()).detach().clone()
            pl_module.layers[0].requires_grad_(False)


def trained(*args: Any, **settings: Any) -> dict[str, Tensor]:
    return weights(run(*args, **settings)[1])


IN_TURN = tuple(zip((2, 0), FRAGMENTS, strict=True))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the Trainer is given, and what the loop
    "plain": ({}, {}),
    "momentum 0": ({"outer_momentum": 0.0}, {"momentum": 0.0}),
    "period 1": ({"local_sgd_period": 1}, {"period": 1}),
    "norms": ({"kind": NormNet}, {"kind": NormNet}),
    "fragments": ({"fragments": 2}, {"parts": IN_TURN}),
    "epochs": ({"epochs": True}, {"epochs": True, "mean_at": (3, 6, 9, 11)}),
    "fragments, epochs": (
        {"fragments": 2, "epochs": True},
        {"parts": IN_TURN, "epochs": True, "mean_at": (3, 6, 9, 11)},
    ),
    "clipped": (
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_steps": 6},
        {"clip": 0.1, "accumulate": 2, "until": 6, "mean_at": (6,)},
    ),
    "SAM": ({"kind": SharpDeep}, {"rho": 0.1}),
    "bf16": ({"precision": "bf16-mixed"}, {"precision": lambda: torch.autocast("cpu", torch.bfloat16)}),
}


QUICK = ("plain", "fragments, epochs", "SAM")


def quick_fits(folder: str) -> dict[str, Any]:
    """Those that run each time, in one pair of processes."""
    found: dict[str, Any] = {name: trained(**CASES[name][0]) for name in QUICK}
    found["local SGD"] = trained(NormNet, outer_lr=1.0, outer_momentum=0.0)
    today = lt.preset("ddp_compressed_bf16", compression="local_sgd", local_sgd_period=4, precision="32-true")
    found["local SGD of today"] = trained(NormNet, **today)
    found |= resumed(folder, "fragments", fragments=2)
    found["bytes"] = {
        "DDP": bytes_of_steps(**lt.preset("ddp_bf16", precision="32-true")),
        "DiLoCo": bytes_of_steps(),
        "fragments": bytes_of_steps(fragments=4),
    }
    warned = pytest.warns(UserWarning, match="this run has no outer optimizer")
    with warned if os.environ["RANK"] == "0" else nullcontext():
        run(ckpt_path=f"{folder}/fragments.ckpt", outer_lr=1.0, outer_momentum=0.0)
    for count in (1, 2):
        freezes, seen = Freezes(), Watching()
        found[f"frozen {count}"] = trained(fragments=count, callbacks=[freezes, seen], find_unused_parameters=True)
        found[f"seen {count}"] = {"frozen": freezes.weight, "steps": seen.steps}
    refused(lt.RewindOnSpike(), "RewindOnSpike.*: a rewind sets back neither the momentum of the outer optimizer")
    refused(None, "Lookahead, which moves them back to a copy of its own", kind=SlowNet)
    refused(lt.ScheduleFree(), "AdamWScheduleFree, which moves them back to a copy of its own", kind=FreeNet)
    refused(None, "fragments=4 are more than PlainNet has layers", kind=PlainNet, fragments=4)
    return found


def all_fits(folder: str) -> dict[str, Any]:
    """All others."""
    found: dict[str, Any] = {name: trained(**given) for name, (given, _) in CASES.items() if name not in QUICK}
    found |= {**resumed(folder, "mid-period"), **resumed(folder, "border", local_sgd_period=3)}
    path, plugin = f"{folder}/after.ckpt", MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", 1024.0))
    run(epochs=True, max_steps=6)[0].save_checkpoint(path)
    found["after a fit"] = trained(epochs=True, ckpt_path=path)
    found["unbroken"] = trained(epochs=True, callbacks=[SaveAt(f"{folder}/6.ckpt", epoch=1)])
    plain = lt.preset("ddp_bf16", precision="32-true")
    run(epochs=True, max_steps=3, **plain)[0].save_checkpoint(path)
    found["from DDP"] = trained(epochs=True, ckpt_path=path)
    found["started"] = trained(epochs=True, compression_start=3)
    found["fp16"], found["fp32"] = trained(precision="16-mixed", plugins=[plugin]), trained()
    seen = Watching()
    found["validated"] = trained(callbacks=[seen], limit_val_batches=1, val_check_interval=6)
    found["seen"] = {"steps": seen.steps, "validated": seen.validated}
    refused(None, "Ranger21, which moves them back to a copy of its own", kind=RangerNet)
    return found


def resumed(folder: str, name: str, **settings: Any) -> dict[str, Any]:
    """A fit that saves at step 6, and one that goes on from there."""
    path = f"{folder}/{name}.ckpt"
    unbroken = trained(callbacks=[lt.ExactResume(), SaveAt(path, step=6)], **settings)
    return {f"unbroken {name}": unbroken, name: trained(callbacks=[lt.ExactResume()], ckpt_path=path, **settings)}


class WideDeep(Deep):
    """Layers of about one size, and so many numbers that nothing else counts."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(4)]
        self.layers = nn.Sequential(nn.Linear(8, 96), nn.Sequential(*blocks), nn.Linear(96, 2))


class Sent(Callback):
    """Bytes that this process has written by the end of each step."""

    def __init__(self) -> None:
        self.totals: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.totals.append(written())


def bytes_of_steps(**settings: Any) -> list[int]:
    """Bytes of the steps 4 to 11, which are two periods; DDP is set up before, and the last step averages all."""
    if not os.path.exists("/proc/self/io"):
        return []
    sent = Sent()
    run(WideDeep, callbacks=[sent], max_steps=12, **settings)
    return [after - before for before, after in zip(sent.totals[2:], sent.totals[3:11], strict=False)]


class SlowNet(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.optimizer("lookahead_adamw", self, 0.01)


class RangerNet(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.optimizer("ranger21", self, 0.01, num_iterations=100)


class FreeNet(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.optimizer("schedulefree_adamw", self, 0.01)


def refused(callback: Callback | None, message: str, **settings: Any) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        run(callbacks=[] if callback is None else [callback], **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outer")


@pytest.fixture(scope="module")
def quick(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(quick_fits, str(folder))


@pytest.fixture(scope="module")
def others(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(all_fits, str(folder))


def is_the_plain_loops(found: dict[str, Tensor], name: str) -> None:
    settings = dict(CASES[name][1])
    assert_close(found, Workers(settings.pop("kind", Deep)).train(**settings), 1e-6)


@pytest.mark.parametrize("name", QUICK)
def test_it_trains_as_the_plain_loop(quick: list[dict[str, Any]], name: str) -> None:
    is_the_plain_loops(quick[0][name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_it_trains_as_the_plain_loop_in_every_regime(others: list[dict[str, Any]], name: str) -> None:
    is_the_plain_loops(others[0][name], name)


def test_ranks_end_equal(quick: list[dict[str, Any]]) -> None:
    for name in (*QUICK, "fragments", "frozen 1", "frozen 2"):
        assert_equal(quick[0][name], quick[1][name])


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_frozen_amid_a_period_becomes_the_mean_at_the_next_synchronisation(
    quick: list[dict[str, Any]], count: int
) -> None:
    first, second = (rank[f"seen {count}"] for rank in quick)
    assert not torch.equal(first["frozen"], second["frozen"])
    mean = (first["frozen"] + second["frozen"]) / 2
    at = {1: 8, 2: 6}[count]
    for steps in (first["steps"], second["steps"]):
        assert_close({"": steps[at - 1]}, {"": mean}, 1e-6)
        assert torch.equal(steps[at - 1], steps[-1])


@pytest.mark.slow
def test_ranks_end_equal_in_every_regime(others: list[dict[str, Any]]) -> None:
    for name in others[0].keys() - {"seen", "norms"}:  # buffers are each rank's own
        assert_equal(others[0][name], others[1][name])


def test_with_rate_1_and_without_momentum_it_is_local_sgd(quick: list[dict[str, Any]]) -> None:
    for rank in quick:
        assert_equal(rank["local SGD"], rank["local SGD of today"])


def test_an_outer_step_of_rate_1_without_momentum_is_the_mean() -> None:
    weight, mean = (nn.Parameter(torch.rand(50, 20)) for _ in range(2))
    outer = OuterOptimizer(1.0, 0.0)
    outer.follow([weight])
    weight.data.copy_(mean)
    outer.step([weight])
    torch.testing.assert_close(weight, mean, atol=1e-7, rtol=0)  # x - (x - y), which is y but for rounding


@pytest.mark.slow
def test_with_scaled_losses_it_trains_almost_as_in_fp32(others: list[dict[str, Any]]) -> None:
    assert_close(others[0]["fp16"], others[0]["fp32"], 0.02)


@pytest.mark.slow
def test_validation_sees_the_mean_and_ends_no_period(others: list[dict[str, Any]]) -> None:
    assert_close(others[0]["validated"], Workers().train(mean_at=(6, 11)), 1e-6)
    first, second = (rank["seen"] for rank in others)
    assert len(first["validated"]) == 1
    assert torch.equal(first["validated"][0], second["validated"][0])
    agreed = [torch.equal(one, two) for one, two in zip(first["steps"], second["steps"], strict=True)]
    assert [step for step, equal in enumerate(agreed, 1) if equal] == [4, 8, 11]  # before the validation of step 6


def test_a_resumed_fit_is_exact(quick: list[dict[str, Any]]) -> None:
    for rank in quick:
        assert_equal(rank["fragments"], rank["unbroken fragments"])


@pytest.mark.slow
def test_a_resumed_fit_is_exact_wherever_it_was_saved(others: list[dict[str, Any]]) -> None:
    for rank in others:
        assert_equal(rank["mid-period"], rank["unbroken mid-period"])
        assert_equal(rank["border"], rank["unbroken border"])
        assert_equal(rank["after a fit"], rank["unbroken"])


@pytest.mark.slow
def test_it_starts_where_data_parallelism_has_come_to(others: list[dict[str, Any]]) -> None:
    assert_equal(others[0]["started"], others[0]["from DDP"])


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_has_two_more_numbers_a_weight(folder: Path) -> None:
    checkpoint = torch.load(folder / "fragments.ckpt", weights_only=True)
    assert checkpoint["outer_optimizer"].keys() == {"weights", "momentum"}
    shapes = {name: value.shape for name, value in checkpoint["state_dict"].items()}
    for values in checkpoint["outer_optimizer"].values():
        assert {name: value.shape for name, value in values.items()} == shapes


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="bytes written are read from Linux's /proc")
def test_it_sends_the_bytes_of_one_step_in_a_period_and_fragments_fewer_at_a_time(quick: list[dict[str, Any]]) -> None:
    whole = 4 * sum(parameter.numel() for parameter in WideDeep().parameters())
    for found in (rank["bytes"] for rank in quick):
        assert sum(found["DDP"]) == pytest.approx(8 * whole, rel=0.1)
        assert sum(found["DiLoCo"]) == pytest.approx(2 * whole, rel=0.1)
        assert sum(found["fragments"]) == pytest.approx(2 * whole, rel=0.1)
        assert max(found["DiLoCo"]) == pytest.approx(whole, rel=0.1)
        assert max(found["fragments"]) < 0.35 * whole


# -- another number of ranks -----------------------------------------------------------------------------------------


def half(path: str) -> None:
    run(epochs=True, max_steps=6)[0].save_checkpoint(path)


def other_half(path: str) -> dict[str, Tensor]:
    return trained(epochs=True, ckpt_path=path)


@pytest.mark.slow
def test_half_a_period_goes_on_with_twice_as_many_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    run_ranks(half, path)
    ended = run_ranks(other_half, path, nprocs=4)
    before, after = Workers(), Workers(world=4)
    after._put(before.train(6, epochs=True, mean_at=(3, 6)))
    after.step, after.last, after.momentum = before.step, before.last, before.momentum
    states = [copy.deepcopy(configured["optimizer"].state_dict()) for configured in before.configured]
    for number, state in states[0]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = (state[name] + states[1]["state"][number][name]) / 2
    for configured in after.configured:
        configured["optimizer"].load_state_dict(copy.deepcopy(states[0]))
        schedule = before.configured[0]["lr_scheduler"]["scheduler"]
        configured["lr_scheduler"]["scheduler"].load_state_dict(schedule.state_dict())
    expected = after.train(epochs=True, mean_at=(9, 11))
    for rank in ended:
        assert_close(rank, expected, 1e-6)


# -- two nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_is_one_worker() -> None:
    expected = Workers().train(size=16)  # the batches of both of its ranks
    for rank in run_ranks(trained, nprocs=4, nodes=2):
        assert_close(rank, expected, 1e-6)


# -- without processes ------------------------------------------------------------------------------------------------


def test_equal_blocks_are_strided_and_the_rest_fills_up() -> None:
    module = build(Deep)
    named = dict(module.named_parameters())
    for part, beginnings in zip(fragments(module, 2), FRAGMENTS, strict=True):
        assert [id(p) for p in part] == [id(named[name]) for name in named if name.startswith(beginnings)]
    assert [id(p) for p in fragments(module, 1)[0]] == [id(p) for p in module.parameters()]
    module.layers[0].requires_grad_(False)
    module.tied = module.layers[1]
    assert [len(part) for part in fragments(module, 2)] == [2, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer_lr": 0.0}, r"outer_lr must be in \[2\.2"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0\.0, 1\.0\), got 1\.0"),
        ({"fragments": 0}, "fragments must be at least 1, got 0"),
        ({"fragments": 101}, "fragments must be at most local_sgd_period=100, .*, got 101"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lt.preset("ddp_diloco_bf16", **arguments)


def test_presets_that_shard_and_other_compressions_have_no_outer_optimizer() -> None:
    with pytest.raises(TypeError, match="'fsdp2_bf16' has no argument outer_lr"):
        lt.preset("fsdp2_bf16", outer_lr=0.7)
    with pytest.raises(ValueError, match="outer_lr has no effect with compression='powersgd'"):
        lt.preset("ddp_compressed_bf16", compression="powersgd", outer_lr=0.7)
