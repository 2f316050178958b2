"""AutoClip equals its formula, written with numpy, and goes on exactly after a resume."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.callbacks.auto_clip import NormHistory, clip_value, scale_down_
from tests.conformance.runs import fp16
from tests.device.devices import CUDA, device
from tests.nets import (
    NormNet,
    PlainNet,
    SaveAt,
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


@pytest.mark.parametrize("percentile", [0, 10, 33.3, 50, 99, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_clip_value_is_numpys_percentile(percentile: float, size: int) -> None:
    history = torch.rand(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    np.testing.assert_allclose(clip_value(history, percentile), np.percentile(history, percentile), rtol=1e-12)
    holes = torch.cat([history, torch.tensor([torch.nan])])
    assert torch.equal(clip_value(holes, percentile), clip_value(history, percentile))


@pytest.mark.parametrize("percentile", [0, 10, 33.3, 100])
@pytest.mark.parametrize("length", [1, 7, None])
def test_a_history_of_numbers_has_numpys_percentile_of_its_last_norms(percentile: float, length: int | None) -> None:
    norms = [*torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist(), 0.5, 0.5]
    norms[3], norms[20], norms[30] = math.nan, math.inf, norms[29]
    history = NormHistory(norms[:5], length)
    for step in range(5, len(norms) + 1):
        last = np.array(norms[:step][-length:] if length else norms[:step])
        counted = last[np.isfinite(last)]
        expected = np.percentile(counted, percentile) if len(counted) else np.nan
        np.testing.assert_allclose(history.value(percentile), expected, rtol=1e-12)
        if step < len(norms):
            history.add(norms[step])


def test_at_its_limit_a_gradient_stays_bit_for_bit() -> None:
    gradient = torch.rand(100)
    before, norm = gradient.clone(), torch.linalg.vector_norm(gradient)
    scale_down_([gradient], norm, norm)
    assert torch.equal(gradient, before)
    for odd in (torch.tensor(torch.inf), torch.tensor(torch.nan)):
        scale_down_([gradient], odd, norm)
        scale_down_([gradient], norm, torch.tensor(torch.nan))
        assert torch.equal(gradient, before)


class ByHand(Callback):
    """The formula, in numpy."""

    def __init__(self, percentile: float, history: int | None) -> None:
        self.percentile, self.history = percentile, history
        self.norms: list[float] = []
        self.clipped = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [each.grad for each in pl_module.parameters()]
        norm = float(np.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients)))
        self.norms.append(norm)
        limit = float(np.percentile(self.norms[-self.history :] if self.history else self.norms, self.percentile))
        if norm > limit:
            self.clipped += 1
            for gradient in gradients:
                gradient.mul_(limit / norm)


@pytest.mark.few(3)
@pytest.mark.parametrize("history", [None, 4])
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, fp16()], ids=["plain", "accumulate", "fp16"])
def test_training_is_that_by_the_formula(history: int | None, settings: dict[str, Any]) -> None:
    reference = ByHand(20, history)
    ours = trained(NormNet, lt.AutoClip(20, history=history), max_epochs=4, **settings)
    theirs = trained(NormNet, reference, max_epochs=4, **settings)
    assert reference.clipped > 3
    assert_close(ours, theirs, 1e-5)


@pytest.mark.parametrize("on", CUDA)
def test_a_device_is_not_waited_for(on: str) -> None:
    with device(on) as there:
        gradients = [torch.rand(100, device=there.name) for _ in range(3)]
        history, norm = torch.rand(50, device=there.name), torch.full((), 3.0, device=there.name)
        expected = [gradient * (clip_value(history, 10) / norm) for gradient in gradients]
        with there.waits(at_most=0):
            scale_down_(gradients, norm, clip_value(history, 10))
        torch.testing.assert_close(gradients, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("history", [None, 4, 1000])
def test_on_a_device_training_is_that_by_the_formula(history: int | None, on: str) -> None:
    ours, reference = build(NormNet), ByHand(20, history)
    with device(on) as there:
        fit(ours, callbacks=[lt.AutoClip(20, history=history)], max_epochs=4, accelerator=there.name)
    assert_close(weights(ours), trained(NormNet, reference, max_epochs=4), 1e-5 if there.simulation else 1e-4)


class Keep(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_norm_and_clip_value_are_logged() -> None:
    keep, reference = Keep(), ByHand(20, None)
    fit(build(NormNet), callbacks=[reference], max_epochs=1)
    fit(build(NormNet), callbacks=[lt.AutoClip(100), keep], log_every_n_steps=1, max_epochs=1)
    norms = [metrics["tricks/grad_norm"] for metrics in keep.seen]
    assert norms[0] == pytest.approx(reference.norms[0])
    assert [metrics["tricks/clip_value"] for metrics in keep.seen] == pytest.approx([*np.maximum.accumulate(norms)])


class Odd(NormNet):
    """Has a gradient of nan in the third step, and no loss in the fourth."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss * float("nan") if batch_idx == 2 else loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        for parameter in self.parameters():
            parameter.data.nan_to_num_(0.0)


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_norms_that_are_not_finite_do_not_count() -> None:
    clip, module = lt.AutoClip(10), build(Odd)
    fit(module, callbacks=[clip], max_epochs=1)
    norms = clip.state_dict()["norms"][0]
    assert norms.isnan().tolist() == [False, False, True, False, False]
    assert clip_value(norms, 10).isfinite()


class Two(NormNet):
    """Two optimizers, which step by themselves."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: 1 + batch_idx % 2]:
            optimizer.step()
        for optimizer in self.optimizers():
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers[n].parameters(), lr=0.1) for n in (0, 3)]


def test_each_optimizer_has_its_own_history() -> None:
    clip, keep = lt.AutoClip(50), Keep()
    run = fit(build(Two), callbacks=[clip, keep], max_epochs=1, log_every_n_steps=1)
    assert {number: len(norms) for number, norms in clip.state_dict()["norms"].items()} == {0: 6, 1: 3}
    assert run.callback_metrics["tricks/grad_norm"] != run.callback_metrics["tricks/grad_norm_1"]


def test_a_resume_goes_on_exactly_with_the_history(tmp_path: Path) -> None:
    clip, other = (lt.AutoClip(30, history=5) for _ in range(2))
    whole = trained(NormNet, clip, SaveAt(tmp_path / "half.ckpt", epoch=1), max_epochs=4)
    resumed = trained(NormNet, other, max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(other.state_dict()["norms"][0], clip.state_dict()["norms"][0])
    assert len(clip.state_dict()["norms"][0]) == 5
    assert_equal(resumed, whole)


class Sharded(ShardedLayers, PlainNet):
    """Under FSDP2."""


def on_two_ranks() -> tuple[list[float], list[float]]:
    histories, settings = [], {"devices": 2, "use_distributed_sampler": False, "max_epochs": 4}
    for kind, strategy in ((PlainNet, "ddp"), (Sharded, ModelParallelStrategy(2, 1))):
        clip = lt.AutoClip(20)
        fit(build(kind), train=rank_loader(), callbacks=[clip], strategy=strategy, **settings)
        histories.append(clip.state_dict()["norms"][0].tolist())
    return histories[0], histories[1]


def test_ranks_have_the_norm_of_all() -> None:
    clip = lt.AutoClip(20)
    fit(build(PlainNet), train=loader(48, batch_size=16), callbacks=[clip], max_epochs=4)
    expected = pytest.approx(clip.state_dict()["norms"][0].tolist(), rel=1e-4)
    for whole, sharded in run_ranks(on_two_ranks):
        assert whole == expected
        assert sharded == expected


def test_mistakes_raise() -> None:
    cases = [
        (ValueError, {"percentile": 101}, r"percentile must be in \[0, 100\], got 101"),
        (TypeError, {"percentile": None}, "percentile must be a number"),
        (ValueError, {"history": 0}, "history must be at least 1"),
        (TypeError, {"history": 1.5}, "history must be an integer"),
    ]
    assert_refused(lt.AutoClip, cases)
    ranges = [(ValueError, {"percentile": percentile}, "percentile must be in") for percentile in (-1, 101)]
    assert_refused(partial(clip_value, torch.ones(3)), ranges)
