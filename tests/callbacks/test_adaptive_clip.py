"""AdaptiveClip equals timm's function, on one process, on two and on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.utils import adaptive_clip_grad
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor, init_device_mesh

import lightning_tricks as lt
from tests.conformance.runs import fp16
from tests.device.devices import CUDA, device
from tests.nets import (
    NormNet,
    PlainNet,
    ShardedLayers,
    assert_close,
    assert_equal,
    build,
    fit,
    loader,
    rank_loader,
    trained,
    weights,
)
from tests.ranks import run_ranks
from tests.refusals import assert_refused

SHAPES: list[tuple[int, ...]] = [(), (5,), (1,), (4, 3), (3, 1), (8, 3, 3, 3), (2, 4, 3, 1, 1)]


def parameters(dtype: torch.dtype, scale: float) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for shape in SHAPES:
        weight = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        weight.grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
        made.append(weight)
    made.append(nn.Parameter(torch.zeros(3, 2)))  # eps counts
    made[-1].grad = torch.ones(3, 2)
    made.append(nn.Parameter(torch.ones(2)))  # has no gradient
    return made


def clipped(function: Any, given: list[nn.Parameter], **settings: float) -> dict[str, Tensor]:
    function(given, **settings)
    return {str(n): each.grad for n, each in enumerate(given) if each.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-4, 0.03, 10.0])
@pytest.mark.parametrize("settings", [{}, {"clip_factor": 0.1, "eps": 0.5}, {"clip_factor": 0.0}])
def test_the_function_is_timms_bit_for_bit(dtype: torch.dtype, scale: float, settings: dict[str, float]) -> None:
    theirs = clipped(adaptive_clip_grad, parameters(dtype, scale), **settings)
    assert_equal(clipped(lt.functional.adaptive_clip_, parameters(dtype, scale), **settings), theirs)


@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("scale", [1e-4, 0.03, 10.0])
def test_on_a_device_it_is_timms_and_waits_for_nothing(scale: float, on: str) -> None:
    with device(on) as there:
        given = [[moved(each, there.name) for each in parameters(torch.float32, scale)[:-1]] for _ in "ab"]
        with there.waits(at_most=0):
            lt.functional.adaptive_clip_(given[0])
        adaptive_clip_grad(given[1])
        for ours, theirs in zip(*given, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def moved(weight: nn.Parameter, name: str) -> Tensor:
    there = weight.detach().to(name).requires_grad_()
    there.grad = None if weight.grad is None else weight.grad.to(name)
    return there


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_gradients_that_are_not_finite_or_zero_are_timms_too(value: float) -> None:
    ours, theirs = parameters(torch.float32, 1.0), parameters(torch.float32, 1.0)
    for given, function in ((ours, lt.functional.adaptive_clip_), (theirs, adaptive_clip_grad)):
        for each in given[:-1]:
            each.grad.view(-1)[0] = value
        given[5].grad.zero_()
        function(given)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, equal_nan=True)


def test_one_tensor_and_none() -> None:
    (only,) = parameters(torch.float32, 1.0)[3:4]
    lt.functional.adaptive_clip_(only)
    expected = parameters(torch.float32, 1.0)[3]
    adaptive_clip_grad(expected)
    assert torch.equal(only.grad, expected.grad)
    lt.functional.adaptive_clip_([])
    lt.functional.adaptive_clip_([nn.Parameter(torch.ones(2))])


class Timm(Callback):
    """AGC by timm, where the hook gets it; the head is the last layer."""

    def __init__(self, clip_factor: float, head: int = 0) -> None:
        self.clip_factor, self.head, self.calls = clip_factor, head, 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.calls += 1
        everything = list(pl_module.parameters())
        adaptive_clip_grad(everything[: len(everything) - self.head], self.clip_factor)


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 3}, fp16(), {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.01}],
    ids=["plain", "accumulate", "fp16", "bf16", "clip"],
)
def test_training_is_that_with_timms_function(settings: dict[str, Any]) -> None:
    theirs, reference = build(NormNet), Timm(0.02)
    run = fit(theirs, callbacks=[reference], **settings)
    assert_equal(trained(NormNet, lt.AdaptiveClip(0.02), **settings), weights(theirs))
    assert reference.calls == run.global_step


def test_the_head_can_be_left_out() -> None:
    ours = trained(NormNet, lt.AdaptiveClip(0.01, exclude=[r"layers\.3\."]))
    whole = trained(NormNet, lt.AdaptiveClip(0.01))
    assert_equal(ours, trained(NormNet, Timm(0.01, head=2)))
    assert not torch.equal(ours["layers.3.weight"], whole["layers.3.weight"])


class Manual(NormNet):
    """Steps by itself, every second batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("settings", [{}, fp16()], ids=["plain", "fp16"])
def test_manual_optimization_is_clipped_as_well(settings: dict[str, Any]) -> None:
    ours, theirs = (trained(Manual, clip, **settings) for clip in (lt.AdaptiveClip(0.02), Timm(0.02)))
    assert_equal(ours, theirs)
    assert not torch.equal(ours["layers.0.weight"], trained(Manual, **settings)["layers.0.weight"])


# -- two ranks ---------------------------------------------------------------------------------------------------------


def cut(parameter: nn.Parameter, mesh: Any, dim: int) -> nn.Parameter:
    local = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)]))
    local.grad = distribute_tensor(parameter.grad, mesh, [Shard(dim)])
    return local


class CutColumns(PlainNet):
    """Weights cut along their second dimension."""

    def configure_model(self) -> None:
        def columns(name: str, layer: nn.Module, mesh: Any) -> None:
            for key, weight in list(layer.named_parameters(recurse=False)):
                dim = weight.ndim - 1
                layer.register_parameter(key, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(dim)])))

        mesh = self.device_mesh["data_parallel"]
        distribute_module(self.layers, mesh, columns, input_fn=_replicated, output_fn=_whole)


def _replicated(module: nn.Module, inputs: tuple[Tensor], mesh: Any) -> Tensor:
    return DTensor.from_local(inputs[0], mesh)


def _whole(module: nn.Module, output: DTensor, mesh: Any) -> Tensor:
    return output.full_tensor()


class Sharded(ShardedLayers, PlainNet):
    """Under FSDP2."""


class Whole(Callback):
    """The full weights at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layers.reshard()  # validation leaves the root unsharded
        self.weights = {name: each.full_tensor().detach() for name, each in pl_module.named_parameters()}


def on_two_ranks() -> dict[str, Any]:
    common = {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False}
    message = r"along their first dimension, got placements .*Shard\(dim=1\)"
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(CutColumns), callbacks=[lt.AdaptiveClip()], strategy=ModelParallelStrategy(2, 1), **common)
    shards_equal_the_whole()
    callbacks = [lt.AdaptiveClip(0.02, exclude=[r"layers\.2\."]), whole := Whole()]
    fit(build(Sharded), callbacks=callbacks, strategy=ModelParallelStrategy(2, 1), **common)
    return whole.weights


def shards_equal_the_whole() -> None:
    from lightning_tricks.callbacks.adaptive_clip import _clip
    from lightning_tricks.core.weights.fsdp2 import FSDP2

    mesh = init_device_mesh("cpu", (2,))
    for scale in (1e-4, 0.03, 10.0):
        given = [each for each in parameters(torch.float32, scale)[1:-1]]  # a scalar cannot be cut
        held, pieces = FSDP2(nn.Module()), [cut(each, mesh, 0) for each in given]
        both = [[each.detach().to_local() for each in pieces], [each.grad.to_local() for each in pieces]]
        vectors = [each for each in (*pieces, *(piece.grad for piece in pieces)) if each.ndim <= 1]
        _clip(*both, 0.01, 1e-3, lambda parts, of=vectors, held=held: held.norms(parts, of=of))
        lt.functional.adaptive_clip_(given)
        for piece, whole in zip(pieces, given, strict=True):
            torch.testing.assert_close(piece.grad.full_tensor(), whole.grad)


def test_shards_are_clipped_as_the_whole_or_refused() -> None:
    alone = trained(PlainNet, lt.AdaptiveClip(0.02, exclude=[r"layers\.2\."]), train=loader(48, batch_size=16))
    assert_close(run_ranks(on_two_ranks)[0], alone, 1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_mistakes_raise() -> None:
    cases = [
        (ValueError, {"clip_factor": -1}, r"clip_factor must be in \[0.0, 1e\+30\], got -1"),
        (TypeError, {"clip_factor": "1"}, "clip_factor must be a number"),
        (ValueError, {"eps": -1.0}, "eps must be in"),
        (TypeError, {"exclude": 3}, "exclude must be a string or a list of strings"),
        (ValueError, {"exclude": ["("]}, "exclude: '\\(' is not a regular expression"),
    ]
    assert_refused(lt.AdaptiveClip, cases)


def test_a_pattern_must_be_found() -> None:
    with pytest.raises(MisconfigurationException, match=r"'\^head' is neither. Names are 'layers.0.bias'"):
        fit(build(NormNet), callbacks=[lt.AdaptiveClip(exclude=["^head"])])
