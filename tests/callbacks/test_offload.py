"""Activations that wait in host memory: the same gradients, less memory of the device, and torch's checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_tricks.callbacks.activation_checkpointing import offload
from tests.core.replay.test_recompute import bert, descend, resnet, wrapped
from tests.device.devices import CUDA, device
from tests.nets import assert_equal


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
