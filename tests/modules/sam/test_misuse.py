"""Steps by hand that sam_step and sam_backward take themselves are refused by name."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import lightning_tricks as lt
from tests.nets import PlainNet, assert_equal, build, fit, weights


def halved(steps: int) -> float:
    return 0.5**steps


class ByHand(lt.SAMMixin, PlainNet):
    """Manual optimization with a schedule; ``misuse`` is what its training step does besides."""

    sam = lt.SAM(0.1)
    automatic_optimization = False
    interval, misuse, method = "step", "", "sam_step"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": LambdaLR(optimizer, halved), "interval": self.interval}]

    def closure(self, batch: Any) -> Tensor:
        optimizer, loss = self.optimizers(), PlainNet.training_step(self, batch, 0)
        if self.misuse == "manual_backward":
            optimizer.zero_grad()
            self.manual_backward(loss)
        if self.misuse == "backward":
            loss.backward(retain_graph=True)
        if self.misuse == "step":
            optimizer.step()
        if self.misuse == "bare step":
            optimizer.optimizer.step()
        if self.misuse == "zero_grad":
            optimizer.zero_grad()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.misuse == "schedule before":
            self.lr_schedulers().step()
        if self.method == "sam_step":
            self.sam_step(partial(self.closure, batch))
        else:
            self.optimizers().zero_grad()
            self.sam_backward(partial(self.closure, batch))
            self.optimizers().step()
        if self.misuse == "schedule after":
            self.lr_schedulers().step()

    def on_train_epoch_end(self) -> None:
        if self.misuse == "schedule at epoch's end":
            self.lr_schedulers().step()


def by_hand(**attributes: Any) -> ByHand:
    module = build(ByHand)
    vars(module).update(attributes)
    return module


@pytest.mark.parametrize("method", ["sam_step", "sam_backward"])
@pytest.mark.parametrize(
    ("misuse", "rule"),
    [
        ("manual_backward", "calls manual_backward, which {} does"),
        ("backward", "calls backward, which {} does"),
        ("step", "steps SGD, which comes after it"),
        ("bare step", "steps SGD, which comes after it"),
    ],
)
def test_a_closure_that_does_more_is_refused_with_the_right_lines(method: str, misuse: str, rule: str) -> None:
    module = by_hand(misuse=misuse, method=method)
    before = weights(module)
    with pytest.raises(MisconfigurationException) as caught:
        fit(module)
    said = str(caught.value)
    assert said.startswith(f"ByHand: the closure of {method} {rule.format(method)}. Write it so:")
    assert f"loss = self.{method}(" in said
    assert len(re.findall(r"^    .*\S$", said, re.MULTILINE)) == 6
    assert_equal(weights(module), before)


@pytest.mark.parametrize("misuse", ["schedule before", "schedule after"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_stepped_by_hand_beside_sam_step_is_refused_within_a_step(misuse: str, interval: str) -> None:
    module = by_hand(misuse=misuse, interval=interval)
    with pytest.raises(MisconfigurationException, match="LambdaLR is stepped by hand beside sam_step, which steps it"):
        fit(module)
    assert module.trainer.global_step <= 1


def test_or_at_the_next_epochs_start() -> None:
    module = by_hand(misuse="schedule at epoch's end", interval="epoch")
    with pytest.raises(MisconfigurationException, match="LambdaLR is stepped by hand beside sam_step"):
        fit(module)
    assert module.trainer.global_step == 6


@pytest.mark.parametrize("settings", [{}, {"interval": "epoch"}, {"misuse": "zero_grad"}])
def test_the_right_way_is_not_refused(settings: dict[str, Any]) -> None:
    module = by_hand(**settings)
    run = fit(module)
    steps = {"step": 12, "epoch": 2}[module.interval]
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1 * halved(steps)


def test_schedules_by_hand_are_right_beside_sam_backward_and_in_epochs_without_sam() -> None:
    run = fit(by_hand(method="sam_backward", misuse="schedule after"))
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1 * halved(12)

    class Later(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch > 0:
                super().training_step(batch, batch_idx)
            else:
                self.optimizers().zero_grad()
                self.manual_backward(PlainNet.training_step(self, batch, batch_idx))
                self.optimizers().step()
                self.lr_schedulers().step()

    run = fit(build(Later))
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1 * halved(12)


def test_a_gradient_penalty_in_the_closure_is_fine() -> None:
    class Penalty(ByHand):
        def closure(self, batch: Any) -> Tensor:
            x = batch[0].detach().requires_grad_()
            loss = PlainNet.training_step(self, (x, batch[1]), 0)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + slope.square().sum()

    fit(build(Penalty))
