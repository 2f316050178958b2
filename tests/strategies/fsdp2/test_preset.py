"""FSDP2 of modules that know nothing of it, in two real processes, against one process on their batches together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from tests.device.devices import CUDA, device, require_devices
from tests.device.nccl import rank_device
from tests.few import few
from tests.nets import PlainNet, SaveAt, assert_close, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import run_ranks
from tests.strategies.sharded import CNN, Block, Manual, Transformer, evaluated, local_bytes, one, two, whole


class SAMTransformer(lt.SAMMixin, Transformer):
    sam = lt.SAM(0.05)


class Compiled(Transformer):
    """The blocks run compiled."""

    def setup(self, stage: str) -> None:
        for number, block in enumerate(self.blocks):
            self.blocks[number] = torch.compile(block, backend="aot_eager")


class InPlace(Transformer):
    """The whole forward pass runs compiled."""

    def setup(self, stage: str) -> None:
        self.compile(backend="aot_eager")


class Sharding(PlainNet):
    """The user shards a part."""

    def configure_model(self) -> None:
        if not isinstance(self.layers[0], FSDPModule):
            fully_shard(self.layers[0], mesh=self.device_mesh["data_parallel"])


class Fails(Transformer):
    fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and self.trainer.global_step == 4:
            raise RuntimeError("planned")
        return super().forward(x)


CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3, "max_epochs": 3}
CASES: dict[str, tuple[type[PlainNet], dict[str, Any], dict[str, Any]]] = {  # module, of the preset, of the Trainer
    "transformer": (Transformer, {}, {"num_sanity_val_steps": 2}),
    "offload": (Transformer, {"offload": True}, {}),
    "clipped": (Transformer, {}, CLIPPED),
    "clipped-offload": (Transformer, {"offload": True}, CLIPPED),
    "by-value": (Transformer, {}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "recomputed": (Transformer, {"activation_checkpointing": True}, {}),
    "named": (Transformer, {"modules": ["Block", "MultiheadAttention"]}, {}),
    "one group": (PlainNet, {}, {}),
    "user's groups": (Sharding, {}, {}),
    "manual": (Manual, {}, {}),
    "sam": (SAMTransformer, {}, {"accumulate_grad_batches": 3}),
    "compiled": (Compiled, {}, {}),
    "compiled in place": (InPlace, {}, {}),
}
FAST = ["transformer", "clipped-offload", "manual", "user's groups"]


def run_case(case: str) -> dict[str, Tensor]:
    kind, arguments, settings = CASES[case]
    return {name.replace("_orig_mod.", ""): w for name, w in whole(two(kind, arguments, **settings)[0]).items()}


def run_cases(cases: list[str]) -> dict[str, Any]:
    return {case: run_case(case) for case in cases}


def in_depth() -> dict[str, Any]:
    found: dict[str, Any] = run_cases(FAST)
    module, run = two(Transformer, {"precision": "bf16-mixed"})
    found["bf16"], found["seen"], found["evaluated"] = whole(module), module.seen, evaluated(run, module)
    optimizer = run.optimizers[0]
    states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    found["bytes"] = [local_bytes(module.parameters()), local_bytes(states)]
    found["dtypes"] = {t.dtype for t in (*states, *module.parameters())}
    found["groups"] = [name for name, each in module.named_modules() if isinstance(each, FSDPModule)]
    for case in ("offload", "recomputed"):
        Block.calls = 0
        module, _ = two(Transformer, CASES[case][1], limit_val_batches=0)
        found[f"{case} calls"] = Block.calls
    found["left"] = [name for name, each in module.named_modules() if "forward" in vars(each)]
    found["names"] = list(module.state_dict())
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(in_depth)


@pytest.fixture(scope="module")
def more_ranks() -> list[dict[str, Any]]:
    return run_ranks(run_cases, [case for case in CASES if case not in FAST])


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_two_ranks_equal_one_process_on_their_batches(request: pytest.FixtureRequest, case: str) -> None:
    kind, _, settings = CASES[case]
    module, _ = one({Sharding: PlainNet, Compiled: Transformer, InPlace: Transformer}.get(kind, kind), **settings)
    for rank in request.getfixturevalue("ranks" if case in FAST else "more_ranks"):
        assert_close(rank[case], weights(module), 1e-5)


def test_in_bf16_too(ranks: list[dict[str, Any]]) -> None:
    module, run = one(Transformer, precision="bf16-mixed")
    expected = evaluated(run, module)
    for rank in ranks:
        assert_close(rank["bf16"], weights(module), 5e-3)
        assert rank["evaluated"]["scores"] == pytest.approx(expected["scores"], abs=1e-2)
        torch.testing.assert_close(rank["evaluated"]["predicted"], expected["predicted"], atol=5e-2, rtol=5e-2)
        assert rank["seen"] == module.seen
        assert (rank["seen"]["product"], rank["seen"]["loss"]) == (torch.bfloat16, torch.float32)
        assert rank["seen"]["same"], "a step gets the very batch"


def test_each_rank_has_half(ranks: list[dict[str, Any]]) -> None:
    module = build(Transformer)
    held = sum(p.nbytes for p in module.parameters())
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad and p is not module.unused.weight)
    assert sum(rank["bytes"][0] for rank in ranks) == held
    assert sum(rank["bytes"][1] for rank in ranks) == 2 * (trained - module.unused.bias.nbytes)
    for rank in ranks:
        assert rank["bytes"][0] == pytest.approx(held / 2, rel=0.02)
        assert rank["dtypes"] == {torch.float32}
        assert rank["groups"] == ["", "blocks.0", "blocks.1"]


def test_blocks_are_run_again_in_the_backward_pass_until_the_fit_ends(ranks: list[dict[str, Any]]) -> None:
    forward = 2 * 3 * 2 * 2  # epochs, batches, passes, blocks
    for rank in ranks:
        assert (rank["offload calls"], rank["recomputed calls"]) == (forward, 2 * forward)
        assert rank["left"] == []
        assert rank["names"] == list(build(Transformer).state_dict())


def cnns(folder: str) -> dict[str, Any]:
    found = {name: whole(two(CNN, **({"strategy": "ddp"} if name == "ddp" else {}))[0]) for name in ("ddp", "fsdp")}
    module, run = two(CNN, limit_val_batches=0)
    found["own"] = {name: buffer.clone() for name, buffer in module.named_buffers()}
    run.save_checkpoint(f"{folder}/cnn.ckpt")
    found["saved"] = dict(module.named_buffers())
    module, data = build(Fails), {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False}
    with pytest.raises(RuntimeError, match="planned"):
        fit(module, **data, **lt.preset("fsdp2_bf16"))
    module.fails = False
    if not hasattr(module, "reset_iter_state"):  # torch < 2.13
        with pytest.raises(MisconfigurationException, match="was interrupted under FSDP2"):
            fit(module, **data, **lt.preset("fsdp2_bf16"))
        return found
    assert all(isinstance(p, DTensor) for p in module.parameters())
    fit(module, **data, **lt.preset("fsdp2_bf16"))
    return found


def test_buffers_are_those_of_the_first_rank_as_under_ddp_and_a_failed_fit_can_be_repeated(tmp_path: Path) -> None:
    ranks = run_ranks(cnns, str(tmp_path))
    means = [name for name in ranks[0]["own"] if name.endswith("running_mean")]
    assert not any(torch.equal(ranks[0]["own"][name], ranks[1]["own"][name]) for name in means)
    for found in ranks:
        assert_close(found["fsdp"], ranks[0]["ddp"], 1e-5)
        assert_equal(found["saved"], ranks[0]["own"])  # the last step's, which each rank has its own of


def evaluated_again() -> None:
    """What is sharded is not looked for again by another Trainer, nor run again for good."""
    arguments = {"modules": ["Block"], "activation_checkpointing": True}
    module, run = two(Transformer, arguments, max_epochs=1)
    first = evaluated(run, module)
    strategy = lt.preset("fsdp2_bf16", precision="32-true", **arguments)
    second = evaluated(trainer(devices=2, use_distributed_sampler=False, **strategy), module)
    assert first["scores"] == second["scores"]
    normed = build(CNN)
    trainer(devices=2, sync_batchnorm=True, strategy="fsdp2_bf16").validate(normed, loader(24), verbose=False)
    assert not any(type(each) is nn.BatchNorm1d for each in normed.modules())


@pytest.mark.slow
def test_a_sharded_module_serves_several_trainers() -> None:
    run_ranks(evaluated_again)


def alone(folder: str) -> dict[str, Any]:
    path = f"{folder}/1.ckpt"
    settings = {"train": loader(48, 16), "devices": 1}
    module, _ = two(Transformer, {"precision": "bf16-mixed"}, callbacks=[SaveAt(path, epoch=0)], **settings)
    again, _ = two(Transformer, {"precision": "bf16-mixed"}, ckpt_path=path, **settings)
    assert_equal(whole(again), whole(module))
    return whole(module)


def test_one_device(tmp_path: Path) -> None:
    (found,) = run_ranks(alone, str(tmp_path), nprocs=1)
    assert_close(found, weights(one(Transformer, precision="bf16-mixed")[0]), 5e-3)


# -- refused ----------------------------------------------------------------------------------------------------------


class Two(PlainNet):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[2])]


class Old(PlainNet):
    def setup(self, stage: str) -> None:
        self.layers = FullyShardedDataParallel(self.layers, device_id=torch.device("cpu"))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "compiled": (lambda: torch.compile(build(PlainNet)), {}, "a compiled model is incompatible .* `FSDP2Preset`"),
    "optimizers": (lambda: build(Two), {}, "one optimizer, got 2"),
    "fsdp1": (lambda: build(Old), {}, "got modules wrapped in FullyShardedDataParallel"),
    "no blocks": (lambda: build(PlainNet), {"activation_checkpointing": True}, "Select submodules with modules="),
    "unknown": (lambda: build(PlainNet), {"modules": ["Blok"]}, "'Blok' is neither"),
}


def refusals() -> dict[str, str]:
    said = {}
    for name, (make, arguments, _) in REFUSED.items():
        with pytest.raises((MisconfigurationException, ValueError, RuntimeError)) as caught:
            fit(make(), **lt.preset("fsdp2_bf16", **arguments))
        said[name] = str(caught.value)
    return said


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return run_ranks(refusals, nprocs=1)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(said: dict[str, str], name: str) -> None:
    assert re.search(REFUSED[name][2], said[name])


def test_fp16_and_switches_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="precision must be one of 'bf16-mixed', '32-true', got '16-mixed'"):
        lt.preset("fsdp2_bf16", precision="16-mixed")
    with pytest.raises(TypeError, match="offload must be True or False, got 'cpu'"):
        lt.preset("fsdp2_bf16", offload="cpu")
    with pytest.raises(TypeError, match="no argument data_parallel_size; it takes activation_checkpointing"):
        lt.preset("fsdp2_bf16", data_parallel_size=1)


# -- on CUDA ----------------------------------------------------------------------------------------------------------


def on_cuda(on: str, devices: int, offload: bool) -> dict[str, Any]:
    settings = {"devices": devices, "train": loader(48, 16), "gradient_clip_val": 0.1}
    arguments = {"precision": "bf16-mixed", "offload": offload, "activation_checkpointing": True}
    with rank_device(on) as there:
        module, run = two(Transformer, arguments, accelerator=there.name, **settings)
        kept = {p.device.type for p in module.parameters()}
        return {"weights": {n: w.cpu() for n, w in whole(module).items()}, "kept": kept, "precision": run.precision}


@pytest.mark.few(1)
@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("devices", few([1, 2], 1))
def test_on_cuda(devices: int, offload: bool, on: str) -> None:
    if on == "real cuda":
        require_devices(devices)
    with device(on) as there:
        module, _ = one(Transformer, accelerator=there.name, precision="bf16-mixed", gradient_clip_val=0.1)
    for found in run_ranks(on_cuda, on, devices, offload, nprocs=devices):  # all ranks have the same batches
        assert_close(found["weights"], {n: w.cpu() for n, w in weights(module).items()}, 5e-3)
        assert found["kept"] == {"cpu" if offload else "cuda"}
        assert found["precision"] == "bf16-mixed"
