"""``ddp_bf16``: data parallelism in bf16-mixed, in two real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_tricks as lt
from tests.device.devices import CUDA, require_devices
from tests.device.nccl import rank_device
from tests.nets import Net, assert_equal, build, fit, loader, trainer, weights
from tests.ranks import run_ranks
from tests.strategies.spy import Spy, facts


def every_fit(folder: str) -> dict[str, Any]:
    """All that is looked at below, in one pair of processes."""
    modules = {name: build(Spy) for name in ("string", "theirs", "override", "first", "resumed")}
    results = {
        name: facts(fit(modules[name], devices=2, max_epochs=2, **settings), modules[name])
        for name, settings in (
            ("string", {"strategy": "ddp_bf16"}),
            ("theirs", {"strategy": "ddp", "precision": "bf16-mixed"}),
            ("override", lt.preset("ddp_bf16", find_unused_parameters=True, gradient_as_bucket_view=False)),
        )
    }
    path = f"{folder}/1.ckpt"
    fit(modules["first"], devices=2, max_epochs=1, strategy="ddp_bf16").save_checkpoint(path)
    run = fit(modules["resumed"], devices=2, max_epochs=2, strategy="ddp_bf16", ckpt_path=path)
    results["resumed"] = facts(run, modules["resumed"])
    for name, strategy in (("ours", {"strategy": "ddp_bf16"}), ("ddp", {"strategy": "ddp", "precision": "bf16-mixed"})):
        # 48 samples: the same number on each rank
        results[f"validated_{name}"] = trainer(devices=2, **strategy).validate(
            build(Spy), loader(48), ckpt_path=path, verbose=False
        )
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(every_fit, str(tmp_path_factory.mktemp("ddp")))


def test_activations_are_bf16_weights_and_gradients_fp32(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        seen = rank["string"]
        assert seen["activation"] is torch.bfloat16
        assert seen["parameters"] == seen["gradients"] == {torch.float32}
        assert (seen["precision"], seen["autocast"], seen["backend"]) == ("bf16-mixed", "cpu", "gloo")
        assert seen["world"] == 2


@pytest.mark.parametrize("name", ["string", "override", "resumed"])
def test_the_ranks_end_with_the_same_weights(ranks: list[dict[str, Any]], name: str) -> None:
    assert_equal(ranks[0][name]["weights"], ranks[1][name]["weights"])


@pytest.mark.parametrize("name", ["theirs", "override"])
def test_training_is_that_of_lightnings_own_ddp_in_bf16(ranks: list[dict[str, Any]], name: str) -> None:
    assert_equal(ranks[0]["string"]["weights"], ranks[0][name]["weights"])


def test_a_resumed_fit_is_exact(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(rank["resumed"]["weights"], rank["string"]["weights"])
        assert rank["resumed"]["steps"] == rank["string"]["steps"] == 6


def test_the_arguments_reach_torchs_ddp(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["string"]["ddp"]["gradient_as_bucket_view"] is True
        assert rank["string"]["ddp"]["find_unused_parameters"] is False
        assert rank["override"]["ddp"]["gradient_as_bucket_view"] is False
        assert rank["override"]["ddp"]["find_unused_parameters"] is True


def test_validation_is_that_of_lightnings_own_ddp_in_bf16(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["validated_ours"] == rank["validated_ddp"]
        assert torch.isfinite(torch.tensor(rank["validated_ours"][0]["val_loss"]))


def fit_on_cuda(on: str, devices: int) -> dict[str, Any]:
    module = build(Spy)
    with rank_device(on) as there:
        return facts(fit(module, accelerator=there.name, devices=devices, strategy="ddp_bf16"), module)


# -- parameters without gradients -------------------------------------------------------------------------------------


class IdleNet(Spy):
    """Two parameters have no part in the loss; a frozen one moves torch's indices."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.idle = nn.Linear(4, 4)
        self.tail = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.tail(x)


def idle_parameters() -> dict[str, Any]:
    """The messages without detection, and the weights with it."""
    found = {}
    for name, settings in (
        ("string", {"strategy": "ddp_bf16"}),
        ("preset", lt.preset("ddp_compressed_bf16")),
        ("class", {"strategy": lt.DDPPreset()}),
    ):
        with pytest.raises(RuntimeError) as caught:
            fit(build(IdleNet), devices=2, **settings)
        found[name] = str(caught.value)
    module = build(IdleNet)
    fit(module, devices=2, **lt.preset("ddp_bf16", find_unused_parameters=True))
    found["weights"] = weights(module)
    with pytest.raises(RuntimeError, match=r"^another$"):
        fit(build(Failing), devices=2, strategy="ddp_bf16")
    return found


class Failing(Spy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise RuntimeError("another")


@pytest.fixture(scope="module")
def idle() -> list[dict[str, Any]]:
    return run_ranks(idle_parameters)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("string", 'Trainer(**lt.preset("ddp_bf16", find_unused_parameters=True))'),
        ("preset", 'Trainer(**lt.preset("ddp_compressed_bf16", find_unused_parameters=True))'),
        ("class", "Trainer(strategy=lt.DDPPreset(..., find_unused_parameters=True))"),
    ],
)
def test_unused_parameters_are_named_with_the_remedy(idle: list[dict[str, Any]], name: str, remedy: str) -> None:
    for rank in idle:
        assert "got no gradients: idle.weight, idle.bias. Use them" in rank[name]
        assert rank[name].endswith(f"{remedy}.")


def test_the_remedy_is_one(idle: list[dict[str, Any]]) -> None:
    assert_equal(idle[0]["weights"], idle[1]["weights"])
    start = weights(build(IdleNet))
    changed = {name for name, value in idle[0]["weights"].items() if not torch.equal(value, start[name])}
    assert changed == {name for name in start if name.startswith(("layers", "tail"))}


# -- one device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp_bf16", "ddp_compressed_bf16"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_on_one_device_it_is_single_bf16(name: str, shuffle: bool) -> None:
    found = {}
    for strategy in (name, "single_bf16"):
        module = build(Net)  # with dropout, so that random numbers count
        run = fit(module, strategy=strategy, train=loader(shuffle=shuffle), sync_batchnorm=True)
        assert not dist.is_initialized()
        assert "WORLD_SIZE" not in os.environ
        found[strategy] = weights(module)
        assert (run.world_size, run.global_rank, run.is_global_zero, run.global_step) == (1, 0, True, 12)
    assert_equal(found[name], found["single_bf16"])


def test_on_one_device_it_validates_tests_predicts_and_resumes(tmp_path: Path) -> None:
    module, resumed = build(Spy), build(Spy)
    run = fit(module, strategy="ddp_bf16", max_epochs=1)
    run.save_checkpoint(tmp_path / "1.ckpt")
    single = trainer(strategy="single_bf16")
    assert run.validate(module, loader(), verbose=False) == single.validate(module, loader(), verbose=False)
    assert run.test(module, loader(), verbose=False) == single.test(module, loader(), verbose=False)
    assert torch.equal(torch.cat(run.predict(module, loader())), torch.cat(single.predict(module, loader())))
    fit(resumed, strategy="ddp_bf16", ckpt_path=tmp_path / "1.ckpt")
    whole = build(Spy)
    fit(whole, strategy="single_bf16")
    assert_equal(weights(resumed), weights(whole))
    assert not dist.is_initialized()


def test_one_device_under_torchrun_is_one_too() -> None:
    (found,) = run_ranks(fit_alone, nprocs=1)
    whole = build(Spy)
    fit(whole, strategy="single_bf16")
    assert_equal(found["weights"], weights(whole))
    assert found["backend"] is None


def fit_alone() -> dict[str, Any]:
    module = build(Spy)
    return facts(fit(module, strategy="ddp_bf16"), module)


@pytest.mark.parametrize("on", CUDA)
def test_on_one_cuda_device_there_is_no_process_group(on: str) -> None:
    (seen,) = run_ranks(fit_on_cuda, on, 1, nprocs=1)
    assert (seen["device"], seen["autocast"], seen["backend"]) == ("cuda", "cuda", None)
    assert seen["activation"] is torch.bfloat16


@pytest.mark.parametrize("on", CUDA)
def test_on_cuda_the_backend_is_nccl(on: str) -> None:
    if on == "real cuda":
        require_devices(2)
    ranks = run_ranks(fit_on_cuda, on, 2)
    for seen in ranks:
        assert (seen["device"], seen["autocast"], seen["backend"]) == ("cuda", "cuda", "nccl")
        assert seen["activation"] is torch.bfloat16
        assert seen["parameters"] == seen["gradients"] == {torch.float32}
        assert_equal(seen["weights"], ranks[0]["weights"])
