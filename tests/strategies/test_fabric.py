"""The strings of presets in ``lightning.fabric.Fabric``: those that are right train right, the others say so."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lightning_tricks as lt
from lightning_tricks.strategies.fabric import IN_FABRIC
from tests.nets import PlainNet, assert_close, build, loader, rank_loader, weights
from tests.ranks import Cases, run_cases

NAMES = {row["name"]: row["precision"] for row in lt.presets()}


def train(fabric: L.Fabric, batches: Any) -> tuple[Any, dict[str, torch.Tensor], list[torch.dtype]]:
    net = build(PlainNet)
    dtypes: list[torch.dtype] = []
    net.layers[0].register_forward_hook(lambda *_: dtypes.append(_[2].dtype))
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    return model, weights(net), dtypes


def under(name: str) -> dict[str, Any]:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=name)
    fabric.launch()
    model, trained, dtypes = train(fabric, rank_loader())
    inner = model._forward_module
    if name.startswith("fsdp2"):
        assert isinstance(inner, FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in inner.parameters())
    else:
        assert isinstance(inner, DistributedDataParallel)
    assert fabric._precision.precision == NAMES[name]
    assert set(dtypes) == {torch.bfloat16 if name.endswith("bf16") else torch.float16}
    return {key: value.numpy() for key, value in trained.items()}


SEVERAL = [name for name in IN_FABRIC if not name.startswith("single")]


@pytest.fixture(scope="module")
def ranks() -> Cases:
    return run_cases(under, SEVERAL)


@pytest.mark.parametrize("name", SEVERAL)
def test_two_processes_train_as_one_on_their_batches_together(name: str, ranks: Cases) -> None:
    one, other = ranks[name]
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=name.replace("ddp", "single").replace("fsdp2", "single"))
    _, expected, _ = train(fabric, loader(48, 16))
    for key, value in expected.items():
        assert (one[key] == other[key]).all()
        torch.testing.assert_close(torch.tensor(one[key]), value, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["single_bf16", "single_fp16"])
def test_one_device_has_the_weights_of_fabrics_own_precision(name: str) -> None:
    ours = train(L.Fabric(accelerator="cpu", devices=1, strategy=name), loader())
    plugin = L.fabric.plugins.MixedPrecision(NAMES[name], "cpu")
    theirs = train(L.Fabric(accelerator="cpu", devices=1, plugins=plugin), loader())
    assert ours[2] == theirs[2]
    assert_close(ours[1], theirs[1], 0)
    plain = train(L.Fabric(accelerator="cpu", devices=1), loader())
    assert plain[2] != ours[2]


def test_the_presets_that_need_a_trainer_say_so() -> None:
    assert set(NAMES) <= set(STRATEGY_REGISTRY)
    others = set(NAMES) - set(IN_FABRIC)
    assert len(others) > 10
    for name in others:
        with pytest.raises(ValueError, match=rf"strategy='{name}' needs a Trainer, got a Fabric: take 'single_bf16'"):
            L.Fabric(accelerator="cpu", devices=1, strategy=name)


@pytest.mark.parametrize("precision", ["32-true", 32, "bf16-true", "64-true"])
def test_another_precision_than_that_of_the_name_is_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=r"'single_bf16' trains in 'bf16-mixed', got precision='(32|bf16|64)-true'"):
        L.Fabric(accelerator="cpu", devices=1, strategy="single_bf16", precision=precision)
    plugin = L.fabric.plugins.HalfPrecision("bf16-true")
    with pytest.raises(ValueError, match="got precision='bf16-true'"):
        L.Fabric(accelerator="cpu", devices=1, strategy="single_bf16", plugins=plugin)


def test_the_precision_of_the_name_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("bf16-mixed", "bf16"):
        with pytest.warns(UserWarning, match="discouraged") if precision == "bf16" else pytest.MonkeyPatch.context():
            L.Fabric(accelerator="cpu", devices=1, strategy="single_bf16", precision=precision)
    monkeypatch.setenv("LT_PRECISION", "32-true")
    monkeypatch.setenv("LT_CLI_USED", "1")
    with pytest.raises(ValueError, match="got precision='32-true'"):
        L.Fabric(accelerator="cpu", devices=1, strategy="single_bf16")


def test_one_device_is_asked_for_one() -> None:
    with pytest.raises(ValueError, match="'single_bf16' trains on one device, got devices=2"):
        L.Fabric(accelerator="cpu", devices=2, strategy="single_bf16")
