"""What each trick keeps in memory beyond a plain fit, at the peak, in multiples of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.conformance.runs import fitted
from tests.conformance.settings import SETTINGS, every_third
from tests.conformance.trick import Enrolment
from tests.device.devices import device
from tests.device.memory import Memory
from tests.device.runs import bare, loader, needs_of
from tests.nets import NormNet

SIZE = 512  # of the layer that has nearly all weights


# In multiples of the trained weights: on the device, in host memory, and what; all others keep nothing.
KEEPS = {
    "BatchSizeWarmup": (1.0, 0.0, "a gradient beside those that are accumulated"),
    "Distill": (2.0, 0.0, "the average, and weights while they are exchanged with it, 64 MB or one at a time"),
    "EMA": (1.0, 0.0, "the average"),
    "Float8": (2.5, 0.0, "weights of the layers in 8 bits, by rows and by columns, and what is between"),
    "GradientStats": (1.0, 0.0, "the weights before a step that is logged"),
    "GradCacheMixin": (1.0, 0.0, "a gradient beside those that are accumulated"),
    "InspectTraining": (2.0, 0.0, "weights and gradients of a step that is looked at"),
    "LoRA": (-2.0, 0.0, "no gradients and optimizer states of frozen weights"),
    "LoRA(lr_ratio=4)": (-2.0, 0.0, "no gradients and optimizer states of frozen weights"),
    'LoRA(variant="dora")': (-2.0, 0.0, "no gradients and optimizer states of frozen weights"),
    "PostHocEMA": (2.0, 2.5, "the two averages; in host memory a weight while it is saved, and one average in 16 bits"),
    "RewindOnSpike": (0.0, 2.0, "weights and states of the optimizer"),
    "SAMCallback": (1.0, 0.0, "the weights before they move"),
    "SAMMixin": (1.0, 0.0, "the weights before they move"),
    "SAMMixin(adaptive=True)": (3.0, 0.0, "the weights before they move, their sizes, and the direction"),
    "SWA": (2.0, 0.0, "the average, and at the end the weights while BatchNorm statistics are taken anew"),
    "Teacher": (1.0, 0.0, "the average"),
    "ScheduleFree": (2.0, 0.0, "the average, and at the end the weights while BatchNorm statistics are taken anew"),
    'optimizer("lookahead_sgd")': (2.0, 0.0, "the slow weights, and the difference while they move"),
}


class Heavy(NormNet):
    """Weights beside which all else is small."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.heavy = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 * self.heavy(torch.ones(SIZE, device=self.device)).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)  # which needs nothing more in its step


class FromSecondStep(Callback):
    """Begins to count peaks when gradients and states of the optimizer are there."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            self.memory.peak = dict(self.memory.live)

    def on_train_end(self, *_: Any) -> None:
        self.peak = dict(self.memory.peak)  # before Lightning takes all to the host


def peak(trick: Enrolment) -> dict[str, float]:
    trick = replace(trick, spoiled=False, stops=False)  # two fits would be in memory
    with device("simulated cuda") as there:
        there.simulation.memory = memory = Memory()
        count = FromSecondStep(memory)
        fitted(
            trick.module(Heavy, "on"),
            callbacks=[*trick.make_callbacks("on"), count],
            accelerator="cuda",
            train=loader(trick, pinned=True),
        )
    return {place: size / (4 * SIZE**2) for place, size in count.peak.items()}


@cache
def plain(*needs: Any) -> dict[str, float]:
    return peak(bare(*needs))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", every_third(0))
def test_a_trick_keeps_no_more_than_is_said(name: str, memory: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    mine, usual = peak(trick), plain(*needs_of(trick))
    on_device, on_host, why = KEEPS.get(name, (0.0, 0.0, ""))
    assert mine["device"] - usual["device"] == pytest.approx(on_device, abs=0.05)
    assert mine["host"] - usual["host"] == pytest.approx(on_host, abs=0.05)
    memory(name, on_device, on_host, why)
