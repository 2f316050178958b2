"""``adamw`` takes what the strategy allows, and trains as ``torch.optim.AdamW``."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils import cpp_extension

from lightning_tricks.optimizers.adamw import adamw
from tests.nets import PlainNet, assert_close, build, fit, loader, spelled, trained, trainer, weights
from tests.ranks import run_ranks
from tests.strategies.zero.test_preset import STEPS, End, both, zero

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Ours(PlainNet):
    def configure_optimizers(self) -> Any:
        return adamw(self, **SETTINGS)


class Theirs(PlainNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), **SETTINGS)


class ShardedOurs(Ours):
    def configure_model(self) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def of(strategy: Any = "auto", module: PlainNet | None = None, **settings: Any) -> torch.optim.Optimizer:
    """What ``adamw`` gives to a module of a Trainer."""
    module = build(Ours) if module is None else module
    module.trainer = trainer(strategy=strategy, **settings)
    return adamw(module, **SETTINGS)


# -- torch's ----------------------------------------------------------------------------------------------------------


def test_training_is_torchs() -> None:
    ours = build(Ours)
    fit(ours, gradient_clip_val=1.0)
    assert_close(weights(ours), trained(Theirs, gradient_clip_val=1.0))
    assert type(ours.optimizers().optimizer) is torch.optim.AdamW
    assert ours.optimizers().defaults["fused"] is True


def test_the_defaults_are_torchs() -> None:
    ours, theirs = adamw(build(PlainNet), 1e-3).defaults, torch.optim.AdamW(build(PlainNet).parameters()).defaults
    assert {**ours, "fused": None} == theirs


@pytest.mark.parametrize(
    ("settings", "fused"),
    [
        ({}, True),
        ({"gradient_clip_val": 1.0}, True),
        ({"precision": "bf16-mixed"}, True),
        ({"precision": "bf16-mixed", "gradient_clip_val": 1.0}, False),
        ({"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]}, False),
        ({"strategy": "zero3_bf16"}, True),
        ({"strategy": "zero2_bf16", "gradient_clip_val": 1.0}, True),
        ({"strategy": "ddp_bf16", "gradient_clip_val": 1.0}, False),
    ],
    ids=spelled,
)
def test_it_is_fused_where_lightning_leaves_gradients_alone(settings: dict[str, Any], fused: bool) -> None:
    optimizer = of(**settings)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"] is fused


@pytest.mark.parametrize("settings", [{"precision": "bf16-mixed"}, {"strategy": "ddp_bf16"}], ids=spelled)
def test_a_fit_in_mixed_precision_may_clip(settings: dict[str, Any]) -> None:
    if "strategy" in settings:
        settings = {"strategy": "single_bf16"}
    fit(build(Ours), max_epochs=1, gradient_clip_val=1.0, **settings)


def test_only_weights_that_train_are_taken() -> None:
    module = build(PlainNet)
    module.layers[0].weight.requires_grad_(False)
    [group] = adamw(module, 1e-3).param_groups
    assert {id(weight) for weight in group["params"]} == {id(w) for w in module.parameters() if w.requires_grad}
    groups = [{"params": [module.layers[0].weight]}, {"params": module.layers[2].parameters(), "weight_decay": 0.0}]
    [group] = adamw(module, 1e-3, params=groups).param_groups
    assert (len(group["params"]), group["weight_decay"]) == (2, 0.0)
    with pytest.raises(ValueError, match=r"got none of PlainNet. Unfreeze"):
        adamw(module.requires_grad_(False), 1e-3)


def test_weights_that_torch_cannot_fuse_are_trained_all_the_same() -> None:
    module = PlainNet()
    module.layers.to("meta")
    assert adamw(module, 1e-3).defaults["fused"] is False


def fit_sharded() -> Any:
    module = build(ShardedOurs)
    fit(module, train=loader(48), strategy=ModelParallelStrategy(2, 1), devices=2, use_distributed_sampler=False)
    module.layers.reshard()
    return {name: weight.full_tensor().detach() for name, weight in module.named_parameters()}


def test_fsdp2_trains_fused() -> None:
    module = trained(Theirs, train=loader(48))
    for rank in run_ranks(fit_sharded):
        assert_close(rank, module, 1e-5)


# -- DeepSpeed's ------------------------------------------------------------------------------------------------------


def test_without_a_compiler_torchs_is_taken_and_the_remedy_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # nothing has been compiled before
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "c++")
    with pytest.warns(UserWarning, match=r"cpu_adam cannot be .*C\+\+ compiler \(apt .*ninja \(pip .*Using torch"):
        optimizer = of("zero3_offload_bf16")
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"] is True


def fit_offloaded() -> dict[Any, tuple[str, End]]:
    os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)  # where pip puts ninja
    results = {}
    for stage in (1, 2, 3):
        module = build(Ours)
        run, end = both(module, zero(stage=stage, offload="cpu"), **STEPS)
        results[stage] = type(run.optimizers[0].optimizer).__name__, end
    return results


@pytest.mark.slow  # compiles DeepSpeed's cpu_adam for a minute, unless it has been
def test_deepspeeds_trains_as_torchs_where_states_are_offloaded() -> None:
    module = trained(Theirs, train=loader(80, 16), **STEPS)
    for rank in run_ranks(fit_offloaded, timeout=500):
        for name, end in rank.values():
            assert name == "DeepSpeedCPUAdam"
            assert_close(end.weights, module, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(cpp_extension.CUDA_HOME is None, reason="DeepSpeed compiles it with nvcc, of the CUDA toolkit")
@pytest.mark.parametrize(
    ("name", "expected"), [("zero2_bf16", "FusedAdam"), ("zero2_offload_bf16", "DeepSpeedCPUAdam")]
)
def test_on_cuda_deepspeed_has_its_own(name: str, expected: str) -> None:
    module: L.LightningModule = build(Ours)
    module.trainer = trainer(strategy=name, accelerator="cuda")
    assert type(adamw(module, **SETTINGS)).__name__ == expected
