"""What is known of losses and gradients; with several ranks see tests/callbacks/test_skip_non_finite.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_tricks.core.nonfinite.finite import FiniteCheck, true_loss
from tests.nets import PlainNet, build, fit


class Steps(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.returned.append(loss.item())
        return loss


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.losses.append(true_loss(trainer, loss).item())


def fp16() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]}


@pytest.mark.parametrize(
    "settings", [dict, lambda: {"accumulate_grad_batches": 3}, fp16], ids=["fp32", "window", "fp16"]
)
def test_the_loss_is_what_the_step_returned(settings: Any) -> None:
    module, callback = build(Steps), Losses()
    module.returned = []
    fit(module, callbacks=[callback], **settings())
    assert callback.losses == pytest.approx(module.returned)


class Asks(Callback):
    """Asks after each backward pass, and notes the answer."""

    def __init__(self) -> None:
        self.watch, self.answers, self.said = FiniteCheck(), list[bool](), ""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.watch.note(trainer, loss if len(self.answers) != 2 else loss * torch.nan)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if len(self.answers) == 4:
            pl_module.layers[2].bias.grad.fill_(torch.inf)
            self.said = self.watch.report(trainer, pl_module)
        self.answers.append(self.watch.finite(trainer, trainer.optimizers))


def test_each_question_is_about_what_came_since_the_last() -> None:
    asks = Asks()
    fit(build(PlainNet), callbacks=[asks], max_epochs=1)
    assert asks.answers == [True, True, False, True, False, False]  # the optimizer has stepped by the infinite one
    assert asks.said.startswith("not finite: the gradients of layers.2.bias; last finite loss: 0.")


class Reuses(Callback):
    """Writes into the loss behind the backward pass, as a compiled network with static memory does."""

    def __init__(self) -> None:
        self.watch, self.answers, self.said = FiniteCheck(), list[bool](), ""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        mine = loss.detach() * (torch.nan if len(self.answers) == 1 else 1)
        self.watch.note(trainer, mine)
        mine.fill_(torch.inf if len(self.answers) == 0 else 0.0)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.answers.append(self.watch.finite(trainer, []))
        self.said = self.watch.report(trainer, pl_module)


def test_a_loss_is_judged_by_what_it_was() -> None:
    reuses = Reuses()
    fit(build(PlainNet), callbacks=[reuses], max_epochs=1, limit_train_batches=2)
    assert reuses.answers == [True, False]
    assert "last finite loss: 0." in reuses.said
