"""``functional.Averager``: the averages of ``EMA``, in plain loops and under Fabric, also sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lightning_tricks as lt
from lightning_tricks.callbacks.ema import ema_decay
from lightning_tricks.functional import Averager
from tests.nets import NormNet, PlainNet, assert_equal, build, fit, loader, rank_loader, trained, weights
from tests.ranks import Cases, run_cases


def losses(net: nn.Module, batches: Any, epochs: int = 2) -> Iterator[Tensor]:
    for _ in range(epochs):
        for x, y in batches:
            yield F.cross_entropy(net(x), y)


def train(net: Any, averager: Averager | None = None, steps: int | None = None) -> None:
    """A plain loop, of so many steps."""
    optimizer = net.configure_optimizers()
    for number, loss in enumerate(losses(net, loader())):
        if number == steps:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if averager is not None:
            averager.update()


@pytest.mark.parametrize(
    "settings", [{}, {"decay": 0.9}, {"warmup": "power"}, {"decay": 0.5, "warmup": False}], ids=str
)
@pytest.mark.parametrize("whole", [True, False], ids=["module", "list"])
def test_the_averages_are_those_of_ema_bit_for_bit(settings: dict[str, Any], whole: bool) -> None:
    expected, net = trained(NormNet, lt.EMA(**settings, at_end="averaged")), build(NormNet)
    averager = Averager(net if whole else net.parameters(), **settings)
    train(net, averager)
    raw = weights(net)
    with averager.swap():
        assert_equal(weights(net), expected)
    assert_equal(weights(net), raw)


def test_a_naive_average_is_the_same() -> None:
    tensors = [torch.zeros(3), nn.Parameter(torch.ones(2, 2)), torch.ones(4, dtype=torch.bfloat16)]
    averager = Averager(iter(tensors), decay=0.9)
    naive = [tensor.detach().float() for tensor in tensors]
    for step in range(30):
        with torch.no_grad():
            for tensor in tensors:
                tensor.add_(torch.randn(tensor.shape) + step)
        d = min(0.9, (1 + step) / (10 + step))
        assert ema_decay(step, 0.9) == d
        now = [tensor.detach().float() for tensor in tensors]
        naive = [average + (1 - d) * (tensor - average) for average, tensor in zip(naive, now, strict=True)]
        averager.update()
    with averager.swap():
        for tensor, average in zip(tensors, naive, strict=True):
            torch.testing.assert_close(tensor.detach(), average.to(tensor.dtype))


def test_before_the_first_update_and_after_an_exception_the_tensors_are_themselves() -> None:
    net = build(PlainNet)
    averager = Averager(net)
    before = weights(net)
    train(net, steps=3)
    raw = weights(net)
    with averager.swap():
        assert_equal(weights(net), raw)
    averager.update()
    with suppress(KeyboardInterrupt), averager.swap():
        assert not torch.equal(weights(net)["layers.0.weight"], before["layers.0.weight"])
        raise KeyboardInterrupt
    assert_equal(weights(net), raw)
    assert net.layers[0].weight.requires_grad


@pytest.mark.parametrize("inside", [False, True], ids=["outside of swap", "in swap"])
def test_a_saved_loop_goes_on_bit_for_bit(tmp_path: Path, inside: bool) -> None:
    whole = build(PlainNet)
    averager = Averager(whole.parameters())
    train(whole, averager, 5)
    other = deepcopy(whole)
    with averager.swap() if inside else nullcontext():
        torch.save(averager.state_dict(), tmp_path / "averager.pt")
    again = Averager(other)
    again.load_state_dict(torch.load(tmp_path / "averager.pt", weights_only=True))
    for net, own in ((whole, averager), (other, again)):
        train(net, own, 4)
    with averager.swap(), again.swap():
        assert_equal(weights(whole), weights(other))


def test_a_loaded_average_is_a_copy() -> None:
    one, other = build(PlainNet), build(PlainNet)
    first, second = Averager(one), Averager(other)
    train(one, first, 3)
    second.load_state_dict(first.state_dict())
    before = [tensor.clone() for tensor in first.state_dict()["averages"]]
    train(other, second, 3)
    assert all(map(torch.equal, before, first.state_dict()["averages"]))


def test_what_has_no_average_is_refused() -> None:
    weight = torch.ones(2)
    other = {"updates": 1, "averages": [torch.ones(3)]}
    for error, call, message in (
        (ValueError, lambda: Averager([]), "must be one to average"),
        (ValueError, lambda: Averager(build(PlainNet).requires_grad_(False)), "none that requires gradients"),
        (ValueError, lambda: Averager([weight, torch.arange(2)]), r"tensors\[1\] must have floating.*got torch.int64"),
        (TypeError, lambda: Averager([1.0]), r"tensors\[0\] must be Tensor"),
        (TypeError, lambda: Averager([{"params": [weight]}]), r"\[0\] must be Tensor, got dict: .* for w in group\["),
        (TypeError, lambda: Averager(torch.optim.SGD([weight])), "must be a module or tensors, .* got SGD"),
        (TypeError, lambda: Averager({"w": weight}), "must be a module or tensors, .* got dict"),
        (ValueError, lambda: Averager([weight], decay=1.0), "decay must be"),
        (ValueError, lambda: Averager([weight], warmup="linear"), "warmup must be"),
        (ValueError, lambda: Averager(nn.LazyLinear(2)), "lazy layer has no weights"),
        (ValueError, lambda: Averager([weight]).load_state_dict({"updates": 1, "averages": []}), "got 0 for 1"),
        (ValueError, lambda: Averager([weight]).load_state_dict(other), r"\[\(3,\)\] for \[\(2,\)\]"),
    ):
        with pytest.raises(error, match=message):
            call()
    averager = Averager([weight])
    averager.update()
    with averager.swap(), pytest.raises(ValueError, match=r"update\(\) needs the tensors' own values"):
        averager.update()


# -- under Fabric, two processes --------------------------------------------------------------------------------------


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    for layer in module.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(module, mesh=mesh["data_parallel"])


class Wide(PlainNet):
    """One whose layers do not divide evenly, and with a weight of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 2))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale.sum()


def under_fabric(strategy: str, folder: str) -> dict[str, dict[str, Tensor]]:
    made = L.fabric.strategies.ModelParallelStrategy(shard, 2, 1) if strategy == "fsdp2" else strategy
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=made)
    fabric.launch()
    net = build(Wide)
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(net.configure_optimizers())
    averager = Averager(model, decay=0.9)
    found = {}
    for epoch in range(3):
        for loss in losses(model, rank_loader(), 1):
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            averager.update()
        x, _ = next(iter(rank_loader()))
        with torch.no_grad():
            before = model(x)  # FSDP2 leaves the weights of the root gathered
            with averager.swap():
                found[f"averaged {epoch}"] = {**weights(net), "output": model(x)}
            assert torch.equal(model(x), before)
        found[f"raw {epoch}"] = weights(net)
        if epoch == 1:
            state = {"model": model, "optimizer": optimizer, "averager": averager.state_dict()}
            fabric.save(f"{folder}/{strategy}", state)
            saved = [average.clone() for average in state["averager"]["averages"]]
    if strategy == "fsdp2":
        with pytest.raises(ValueError, match=r"tensors\[0\] is a shard of a module's weight, got a DTensor: pass the"):
            Averager(model.parameters())
    fabric.load(f"{folder}/{strategy}", state)
    averager.load_state_dict(state["averager"])
    assert_equal(weights(net), found["raw 1"])
    assert all(map(torch.equal, averager.state_dict()["averages"], saved))
    with averager.swap():
        assert_equal(weights(net), {n: v for n, v in found["averaged 1"].items() if n != "output"})
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return run_cases(under_fabric, ["ddp", "fsdp2"], str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_under_fabric_the_ranks_have_the_average_of_a_plain_loop(strategy: str, ranks: Cases) -> None:
    one, other = ranks[strategy]
    net = build(Wide)
    averager, optimizer = Averager(net, decay=0.9), net.configure_optimizers()
    for epoch in range(3):
        for loss in losses(net, loader(48, 16), 1):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averager.update()
        for name in ("raw", "averaged"):
            with averager.swap() if name == "averaged" else nullcontext():
                for key, value in weights(net).items():
                    for rank in (one, other):
                        torch.testing.assert_close(rank[f"{name} {epoch}"][key], value)
                if name == "averaged":
                    x = next(iter(loader(48, 16)))[0]
                    whole = torch.cat([rank[f"averaged {epoch}"]["output"] for rank in (one, other)])
                    torch.testing.assert_close(whole, net(x).detach())


def test_the_callback_and_the_averager_agree_in_one_fit() -> None:
    """A user's own callback with an Averager, beside EMA."""
    net = build(NormNet)

    class Own(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.averager = Averager(pl_module.parameters(), 0.9)

        def on_train_batch_end(self, *_: Any) -> None:
            self.averager.update()

    own, ema = Own(), lt.EMA(0.9, at_end="raw")
    fit(net, callbacks=[own, ema])
    with own.averager.swap():
        averaged = weights(net)
    with ema.averaged(net):
        assert_equal(weights(net), averaged)


def test_all_of_it_works_in_inference_mode() -> None:
    network = torch.nn.Linear(2, 1)
    with torch.inference_mode():
        averager = Averager(network, decay=0.5, warmup=False)
    for _ in range(2):
        network(torch.ones(1, 2)).sum().backward()
        averager.update()
        with torch.inference_mode(), averager.swap():
            network(torch.ones(1, 2))
            state = averager.state_dict()
    with torch.inference_mode():
        averager.update()
        averager.load_state_dict(state)
    averager.update()
    network(torch.ones(1, 2)).sum().backward()
