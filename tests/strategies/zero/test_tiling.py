"""Tiles of a large layer under ZeRO-3, as docs/scaling.md has them: one is gathered at a time."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.conformance.runs import Gather
from tests.nets import PlainNet, assert_close, build, loader, rank_loader, trainer, weights
from tests.ranks import Cases, run_cases
from tests.test_docs import DOCS, blocks


def page() -> dict[str, Any]:
    """The names of the page."""
    found = [block for block in blocks(DOCS / "scaling.md", "python") if "TiledLinear" in block or "stage3" in block]
    names: dict[str, Any] = {"torch": torch, "L": L, "lt": lt}
    exec("".join(found), names)
    return names


class Alone(PlainNet):
    """The same network without tiles."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        first, large, last = nn.Linear(8, 16), nn.Linear(16, 64), nn.Linear(64, 2)
        self.layers = nn.Sequential(first, nn.Tanh(), large, nn.Tanh(), last)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gathered(Callback):
    """The most weights of the large layer that a rank has, or is about to have, at a time."""

    most = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        def count(*_: Any) -> None:
            away, weights = ZeroParamStatus.NOT_AVAILABLE, pl_module.layers[2].parameters()
            self.most = max(self.most, sum(weight.ds_numel for weight in weights if weight.ds_status != away))

        for layer in (each for each in pl_module.modules() if isinstance(each, nn.Linear)):
            layer.register_forward_pre_hook(count)  # behind DeepSpeed's own, which gathers
            layer.register_full_backward_pre_hook(count)
            layer.register_full_backward_hook(count)


def on_ranks(case: str) -> tuple[dict[str, Tensor], int]:
    gather, gathered = Gather(), Gathered()
    strategy = cpu_deepspeed()
    if case != "by default":
        strategy.config["zero_optimization"] |= page()["settings"]
    module = build(Alone if case == "plain" else page()["Tiled"])
    run = trainer(callbacks=[gather, gathered], strategy=strategy, devices=2, use_distributed_sampler=False)
    run.fit(module, rank_loader(), loader(8))
    return gather.weights, gathered.most


@pytest.fixture(scope="module")
def ranks() -> Cases:
    return run_cases(on_ranks, ["tiled", "plain", "by default"])


@pytest.mark.slow
def test_tiles_on_two_ranks_train_what_the_layer_does(ranks: Cases) -> None:
    trainer().fit(module := build(Alone), loader(48, 16), loader(8))
    expected, name = weights(module), "layers.2.weight"
    for found, _ in ranks["tiled"]:
        assert_close({name: page()["joined"](found, "layers.2")}, {name: expected[name]}, 1e-5)
        biases = torch.cat([found[f"layers.2.linears.{row}.1.bias"] for row in range(4)])
        torch.testing.assert_close(biases, expected["layers.2.bias"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["layers.4.weight"], expected["layers.4.weight"], atol=1e-5, rtol=1e-5)
    assert (build(Alone).layers[2].weight - expected[name]).abs().max() > 1e-3


@pytest.mark.slow
def test_one_tile_is_gathered_at_a_time(ranks: Cases) -> None:
    weight, bias = 16 * 64, 64
    for case in ("plain", "by default"):
        assert [most for _, most in ranks[case]] == [weight + bias] * 2
    assert [most for _, most in ranks["tiled"]] == [weight // 8 + bias // 4] * 2


def test_tiles_compute_what_the_layer_does() -> None:
    names = page()
    module = build(names["Tiled"])
    layer, x = module.layers[2], torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    module.configure_model()
    assert type(module.layers[2]).__name__ == "TiledLinear"
    torch.testing.assert_close(module.layers[2](x), layer(x))
    assert torch.equal(names["joined"](module.state_dict(), "layers.2"), layer.weight)
