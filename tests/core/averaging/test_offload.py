"""Averages in host memory of weights on a GPU: the copy under way is never overtaken by the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.transfer import Offload
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import trainable
from tests.device.devices import CUDA, device
from tests.nets import Net, assert_close, build, fit, weights


def test_nothing_is_offloaded_from_the_host_or_to_the_device() -> None:
    tensor = torch.zeros(3)
    assert Offload.between({"x": tensor}, [tensor]) is None
    assert Offload.between({}, []) is None


def big(width: int, name: str) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).to(name)


@pytest.mark.parametrize("on", CUDA)
def test_a_copy_is_complete_before_the_weights_change(on: str) -> None:
    """On a real device the layers are large, so that a copy takes its time; a simulated one finds what is too early."""
    with device(on) as there:
        module = big(2048 if there.simulation is None else 4, there.name)
        averages = Averages(LocalWeights(module), "cpu")
        averages.track(trainable(module))
        reference = {name: value.clone() for name, value in averages.tensors.items()}
        for step in range(20):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(float(step))
            averages.lerp(0.5)
            averages.guard()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(1e9)  # what a step that comes too early would leave in the average
            reference = {name: value + 0.5 * (step - value) for name, value in reference.items()}
        assert all(value.device.type == "cpu" for value in averages.tensors.values())
        for name, value in averages.tensors.items():
            torch.testing.assert_close(value, reference[name])
        if there.simulation is not None:
            assert not there.simulation.races
            assert "synchronize" not in {wait.what for wait in there.simulation.waits}


@pytest.mark.parametrize("on", CUDA)
def test_a_weight_written_to_in_the_forward_pass_is_an_error(on: str) -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layers[0].weight.mul_(1.0)
            return super().forward(x)

    with device(on) as there:
        fit(build(Writes), callbacks=[lt.EMA(0.9)], accelerator=there.name)
        with pytest.raises(RuntimeError, match="Use device=None for a module that changes its weights in the forward"):
            fit(build(Writes), callbacks=[lt.EMA(0.9, device="cpu")], accelerator=there.name)


@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("settings", [{}, {"precision": "16-mixed"}, {"precision": "bf16-true"}], ids=str)
def test_a_fit_gives_the_same_average_in_either_memory(settings: Any, on: str, tmp_path: Any) -> None:
    beside, apart, resumed = build(), build(), build()
    with device(on) as there:
        settings = {**settings, "accelerator": there.name}
        fit(beside, callbacks=[lt.EMA(0.9)], **settings)
        run = fit(apart, callbacks=[lt.EMA(0.9, device="cpu")], **settings)
        assert_close(weights(beside), weights(apart), 1e-5)
        run.save_checkpoint(tmp_path / "x.ckpt")
        fit(resumed, callbacks=[lt.EMA(0.9, device="cpu")], ckpt_path=tmp_path / "x.ckpt", **settings)
        assert_close(weights(resumed), weights(apart), 1e-6)
        assert there.simulation is None or not there.simulation.races
