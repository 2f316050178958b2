"""Two optimizers that step after each batch train, with a trick, what one optimizer of all weights trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import lightning_tricks as lt
from tests.conformance.runs import refusal, run
from tests.conformance.settings import SETTINGS, quick
from tests.conformance.test_manual import ManualNet, by_hand
from tests.conformance.trick import public_name
from tests.nets import PlainNet, assert_close, assert_equal, build, loader, weights
from tests.reference.sam import naive_perturb


def halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of the last layer apart from the others."""
    last = list(module.layers[-1].parameters())
    return [p for p in module.layers.parameters() if all(p is not other for other in last)], last


def sgd(parameters: list[nn.Parameter], lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-3)  # as that of Net


class TwoOptimizers(ManualNet):
    def configure_optimizers(self) -> Any:
        optimizers = [sgd(parameters) for parameters in halves(self)]
        if self.factory is None:
            return optimizers
        return [self.factory(optimizer, **self.length()) for optimizer in optimizers]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def loss() -> Tensor:
            return PlainNet.training_step(self, batch, batch_idx)

        optimizers, schedules = self.optimizers(), self.lr_schedulers() or []
        if isinstance(self, lt.SAMMixin):
            for optimizer in optimizers:
                self.sam_step(loss, optimizer=optimizer)
            return
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss())
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            if isinstance(schedule, lt.schedules.CurveLR):
                schedule.step()

    def on_validation_epoch_end(self) -> None:
        for schedule in (self.lr_schedulers() or []) if self.factory else []:
            if isinstance(schedule, lt.schedules.PlateauLR):
                schedule.step(self.trainer.callback_metrics["val_loss"])


# Lightning counts the steps of both optimizers
TWICE: dict[str, Callable[[], list[Callback]]] = {
    "GradualUnfreeze": lambda: [lt.GradualUnfreeze([6], parameters=[r"^layers\.0"], lr_factor=0.5)],
    "LayerFreezing": lambda: [lt.LayerFreezing(start=6, stop=6, parameters=[r"^layers\.0"])],
    "ProgressiveResizing": lambda: [lt.ProgressiveResizing(0.5, stop=8, multiple_of=1)],
    "SequenceLengthWarmup": lambda: [lt.SequenceLengthWarmup(0.5, stop=8, multiple_of=1, inputs=0)],
    "SWA": lambda: [lt.SWA(start=6)],
}


def autoclip(module: Any, batch: Any, norms: tuple[list[float], list[float]]) -> None:
    """Each optimizer has its own norm and its own history."""
    F.cross_entropy(module(batch[0]), batch[1]).backward()
    for parameters, history in zip(halves(module), norms, strict=True):
        history.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters)))
        for p in parameters:
            p.grad *= min(1.0, np.percentile(history, 10) / history[-1])


def sam(module: Any, batch: Any, optimizers: list[torch.optim.Optimizer], eta: float | None) -> None:
    """One optimizer after the other perturbs its own weights, by 0.1, and steps."""
    names = {p: name for name, p in module.named_parameters()}
    for parameters, optimizer in zip(halves(module), optimizers, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(module(batch[0]), batch[1]), parameters)
        old = [p.detach().clone() for p in parameters]
        naive_perturb({names[p]: p for p in parameters}, gradients, 0.1, eta)
        gradients = torch.autograd.grad(F.cross_entropy(module(batch[0]), batch[1]), parameters)
        with torch.no_grad():
            for p, value, g in zip(parameters, old, gradients, strict=True):
                p.copy_(value)
                p.grad = g
        optimizer.step()
        optimizer.zero_grad()


def naive(name: str) -> dict[str, Tensor]:
    """A plain loop of the tricks that treat two optimizers otherwise than one."""
    module, norms = build(PlainNet), ([], [])
    optimizers = [sgd(parameters) for parameters in halves(module)]
    for _ in range(2):
        for batch in loader():
            if public_name(name) == "SAMMixin":
                sam(module, batch, optimizers, 0.01 if "adaptive" in name else None)
                continue
            autoclip(module, batch, norms)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return weights(module)


@pytest.mark.parametrize("name", quick("AutoClip", "EMA", "SAMMixin", "StepInBackward", "SWA", "cosine"))
def test_two_optimizers(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    if "manual" in trick.refused:  # Lightning steps one optimizer only by itself
        message = refusal(trick, base=TwoOptimizers)
        assert public_name(name) in message
        cell(name, "several", "refused", message)
        return
    two = by_hand(replace(trick, callbacks={"on": TWICE[name]}) if name in TWICE else trick, TwoOptimizers)
    if public_name(name) in ("AutoClip", "SAMMixin"):
        assert_close(two, naive(name), 1e-5)
    else:
        assert_equal(two, run(trick, base=PlainNet))
    cell(name, "several")
