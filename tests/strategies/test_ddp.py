"""``ddp_bf16``: data parallelism in bf16-mixed, in two real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_tricks as lt
from tests.nets import assert_equal, build, fit, loader, trainer
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


def fit_on_cuda(devices: int) -> dict[str, Any]:
    module = build(Spy)
    return facts(fit(module, accelerator="cuda", devices=devices, strategy="ddp_bf16"), module)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [1, 2])
def test_on_cuda_the_backend_is_nccl(devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    ranks = run_ranks(fit_on_cuda, devices, nprocs=devices)
    for seen in ranks:
        assert (seen["device"], seen["autocast"], seen["backend"]) == ("cuda", "cuda", "nccl")
        assert seen["activation"] is torch.bfloat16
        assert seen["parameters"] == seen["gradients"] == {torch.float32}
        assert_equal(seen["weights"], ranks[0]["weights"])
