"""Activations are computed again: the same gradients and the same state, with less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard

import lightning_tricks as lt
import lightning_tricks.core.replay.recompute as recomputing
from lightning_tricks.callbacks.activation_checkpointing import offload
from lightning_tricks.core.lightning.patching import wrap_method
from tests.conformance.engines import cpu_deepspeed
from tests.core.replay.test_recompute import bert, descend, resnet, wrapped
from tests.device.devices import CUDA, device
from tests.nets import TORCH_2_9, Net, assert_close, assert_equal, build, fit, rank_loader, weights
from tests.ranks import run_ranks
from tests.refusals import assert_refused

policies = pytest.mark.parametrize("policy", ["full", "selective", "offload"])
one_policy = pytest.mark.parametrize(  # where it is compiled, which takes a second
    "policy", ["selective", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("full", "offload"))]
)


def block(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(2 * width, width)
    )


class Deep(Net):
    """Repeated blocks with BatchNorm and dropout."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 16), *(block() for _ in range(3)), nn.Linear(16, 2))


class Gather(Callback):
    """The full weights at the end, put together from their shards."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        whole: Callable[[Tensor], Tensor] = Tensor.clone
        if isinstance(trainer.strategy, ModelParallelStrategy):
            pl_module.layers.reshard()
            whole = lambda weight: weight.full_tensor()  # noqa: E731
        elif "DeepSpeed" in type(trainer.strategy).__name__:
            from deepspeed.utils import safe_get_full_fp32_param

            whole = safe_get_full_fp32_param
        self.weights = {name: whole(weight).detach().clone() for name, weight in pl_module.named_parameters()}


def trained(kind: type[Net], *callbacks: Callback, **settings: Any) -> dict[str, Tensor]:
    module, gather = build(kind), Gather()
    fit(module, callbacks=[gather, *callbacks], **settings)
    return gather.weights


@pytest.mark.few(1)
@policies
def test_a_fit_is_bit_equal_to_one_without(policy: Any) -> None:
    plain, module = build(Deep), build(Deep)
    fit(plain)
    trainer = fit(module, callbacks=[lt.ActivationCheckpointing(policy=policy)])
    assert_equal(weights(module), weights(plain))
    assert_equal(trainer.callback_metrics, fit(build(Deep)).callback_metrics)
    assert not any("forward" in each.__dict__ for each in module.modules())


def test_blocks_are_wrapped_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    real = recomputing.checkpoint
    noted = lambda *args, **kwargs: calls.append(torch.is_grad_enabled()) or real(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(recomputing, "checkpoint", noted)
    fit(build(Deep), callbacks=[lt.ActivationCheckpointing()], max_epochs=1)
    assert calls == [True] * 3 * 6  # blocks, batches


def test_an_exception_leaves_the_module_as_it_was() -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            assert "forward" in pl_module.layers[1].__dict__
            raise RuntimeError("planned")

    module = build(Deep)
    with pytest.raises(RuntimeError, match="planned"):
        fit(module, callbacks=[lt.ActivationCheckpointing(), Stop()])
    assert not any("forward" in each.__dict__ for each in module.modules())


class Sharp(lt.SAMMixin, Deep):
    sam = lt.SAM(rho=0.1)


@pytest.mark.few(3)
@policies
@pytest.mark.parametrize(
    "others",
    [
        lambda: [lt.EMA(0.9)],
        lambda: [lt.HiddenMixup("layers.2.4", alpha=1.0)],  # a layer within a block
        lambda: [lt.HiddenMixup("layers.2", alpha=1.0), lt.HardExampleFilter()],
        lambda: [lt.Mixup(alpha=1.0), lt.HardExampleFilter(0.5, mode="loss")],
        lambda: [lt.SWA(start=0.5)],
    ],
    ids=["EMA", "HiddenMixup", "outside", "Mixup", "SWA"],
)
@pytest.mark.parametrize("kind", [Deep, pytest.param(Sharp, marks=pytest.mark.slow)])
def test_it_changes_nothing_beside_other_tricks(kind: type[Net], others: Any, policy: Any) -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}
    with_it = trained(kind, lt.ActivationCheckpointing(policy=policy), *others(), **settings)
    assert_equal(with_it, trained(kind, *others(), **settings))


class Compiled(Deep):
    """The network runs compiled, in one graph."""

    def setup(self, stage: str) -> None:
        self.run = torch.compile(self.layers, backend="aot_eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_compiled_network_is_recomputed_too(policy: Any) -> None:
    plain, module, settings = build(Compiled), build(Compiled), {"max_epochs": 1, "limit_train_batches": 3}
    fit(plain, **settings)
    fit(module, callbacks=[lt.ActivationCheckpointing(policy=policy)], **settings)
    assert_close(weights(module), weights(plain))


class Broken(Deep):
    """The network runs compiled, in as many graphs as it takes."""

    def setup(self, stage: str) -> None:
        self.run = torch.compile(self.layers, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_graphs_break_where_activations_are_offloaded() -> None:
    plain, module, settings = build(Broken), build(Broken), {"max_epochs": 1, "limit_train_batches": 3}
    fit(plain, **settings)
    fit(module, callbacks=[lt.ActivationCheckpointing(policy="offload")], **settings)
    assert_close(weights(module), weights(plain))
    with pytest.raises(Exception, match="offload"):
        fit(build(Compiled), callbacks=[lt.ActivationCheckpointing(policy="offload")], **settings)


class Breaks(nn.Module):
    """A block that cannot be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        y = y + 1 if y.sum().item() < 1e9 else y
        return x + self.drop(torch.tanh(y))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@one_policy
def test_state_is_right_where_a_compiled_graph_breaks(policy: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(Breaks(), Breaks()), torch.randn(4, 8)
    again = wrapped(model, policy)
    runs = {each: torch.compile(each, backend="aot_eager") for each in (model, again)}
    for _ in range(2):
        ended = [descend(each, lambda each: runs[each](x).square().sum()) for each in (again, model)]
        assert_close(*ended)
    assert again[0].norm.num_batches_tracked == 2


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@policies
def test_a_compiled_part_of_a_block_stays_compiled(policy: str) -> None:
    if TORCH_2_9 and policy == "selective":
        pytest.skip("a limit of torch 2.9: nothing is compiled while it looks at single operations")
    torch.compiler.reset()
    graphs: list[Any] = []
    torch.manual_seed(0)
    part = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))  # noqa: E731
    model, x = nn.Sequential(*(nn.Sequential(part(), nn.BatchNorm1d(4)) for _ in range(2))), torch.randn(6, 4)
    again = wrapped(model, policy)
    compiled = torch.compile(lambda forward, x: forward(x), backend=lambda graph, _: graphs.append(graph) or graph)
    for each in again:
        wrap_method(each[0], "forward", compiled)
    assert_close(descend(again, lambda m: m(x).square().sum()), descend(model, lambda m: m(x).square().sum()))
    assert graphs


# -- several processes ------------------------------------------------------------------------------------------------


class Sharded(Deep):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        for each in self.layers[1:4]:
            each[1] = nn.Identity()

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for each in (self.layers[1], self.layers[2], self.layers):
                fully_shard(each, mesh=self.device_mesh["data_parallel"])


ENGINES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "unused": lambda: DDPStrategy(find_unused_parameters=True),
    "static": lambda: DDPStrategy(static_graph=True),
    "FSDP2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "ZeRO-1": lambda: cpu_deepspeed(1),
    "ZeRO-3": lambda: cpu_deepspeed(3),
}


def two_ranks(engines: list[str]) -> None:
    for name in engines:
        settings = {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False}
        kind = Deep if name in ("ddp", "static") else Sharded
        plain = trained(kind, strategy=ENGINES[name](), **settings)
        for policy in ("full", "selective", "offload"):
            callback = lt.ActivationCheckpointing(policy=policy)
            assert_equal(trained(kind, callback, strategy=ENGINES[name](), **settings), plain)


@pytest.mark.slow
@pytest.mark.parametrize("engines", [["ddp", "unused", "static", "FSDP2"], ["ZeRO-1", "ZeRO-3"]], ids=str)
def test_two_ranks_are_bit_equal_to_two_ranks_without(engines: list[str]) -> None:
    run_ranks(two_ranks, engines)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named() -> None:
    cases = [
        (TypeError, {"modules": [nn.Linear]}, "modules must be a string or a list"),
        (ValueError, {"modules": 0}, "at least 1"),
        (ValueError, {"policy": "some"}, "must be one of"),
    ]
    assert_refused(lt.ActivationCheckpointing, cases)


def test_no_block_is_an_error() -> None:
    with pytest.raises(MisconfigurationException, match=r"selects nothing in Net: there are no repeated blocks"):
        fit(build(Net), callbacks=[lt.ActivationCheckpointing()])
    with pytest.raises(MisconfigurationException, match=r"'Bert' is neither. Names are 'layers'"):
        fit(build(Net), callbacks=[lt.ActivationCheckpointing("Bert")])


@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
def test_a_device_that_torch_has_no_module_for_is_refused(policy: Any) -> None:
    class OnXLA(Deep):
        device = property(lambda self: torch.device("xla", 0))

    with pytest.raises(MisconfigurationException, match=r"on cuda, mps, xpu and cpu, got a device of type 'xla'"):
        fit(build(OnXLA), callbacks=[lt.ActivationCheckpointing(policy=policy)])


# -- activations that wait in host memory: the same gradients, less memory of the device, and torch's checks ----------


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [resnet, bert])
def test_gradients_and_state_are_bit_equal(made: Any) -> None:
    torch.manual_seed(0)
    model, loss = made()
    again = wrapped(model, "offload")
    for _ in range(2):
        assert_equal(descend(again, loss), descend(model, loss))


def test_a_graph_is_used_several_times() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    value = offload(layer, layer.forward, x).square().sum()
    first, second = (torch.autograd.grad(value, layer.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("written", ["input", "weight"])
def test_a_saved_tensor_that_is_written_raises_as_without(written: str) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True) * 1
    for forward in (layer, lambda x: offload(layer, layer.forward, x)):
        value = forward(x).sum()
        with torch.no_grad():
            (x if written == "input" else layer.weight).add_(1)
        with pytest.raises(RuntimeError, match=r"in-?place operation"):
            value.backward()


def test_nothing_is_saved_apart_without_gradients() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        assert torch.equal(offload(layer, layer.forward, torch.ones(1, 4)), layer(torch.ones(1, 4)))


def blocks(name: str, size: int = 256) -> tuple[nn.Sequential, Tensor]:
    wide = 4 * size
    model = nn.Sequential(*(nn.Sequential(nn.Linear(size, wide), nn.GELU(), nn.Linear(wide, size)) for _ in range(8)))
    return model.to(name), torch.randn(16 * size, size, device=name)


@pytest.mark.parametrize("on", CUDA)
def test_activations_leave_a_device_and_nobody_waits(on: str) -> None:
    with device(on) as there:
        model, x = blocks(there.name, 256 if there.simulation is None else 8)
        again = wrapped(model, "offload")
        F.mse_loss(model(x), x).backward()
        with there.waits(at_most=0):
            F.mse_loss(again(x), x).backward()
        for own, other in zip(model.parameters(), again.parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.equal(own.grad, other.grad)
        saved: list[Tensor] = []
        with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
            offload(again[0], again[0].forward, x)
        assert not saved, "the inner hooks take all of a block"


@pytest.mark.gpu
def test_a_gpu_keeps_fewer_bytes() -> None:
    model, x = blocks("cuda")
    again, peaks = wrapped(model, "offload"), []
    for each in (model, again):
        F.mse_loss(each(x), x).backward()  # workspaces are made
        each.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        value = F.mse_loss(each(x), x)
        peaks.append(torch.cuda.memory_allocated() - before)
        value.backward()
    assert peaks[1] < 0.2 * peaks[0]
