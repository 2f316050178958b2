"""Whether tensors are finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_tricks.core.nonfinite.finite import FiniteCheck, all_finite, nonfinite_names, true_loss
from tests.nets import PlainNet, build, fit

GOOD = [torch.ones(3), torch.zeros(2, 2), torch.tensor(3e38), torch.empty(0), torch.ones(2, dtype=torch.float16)]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_one_entry_is_found(value: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(1000, dtype=dtype)
    assert all_finite([*GOOD, tensor])
    tensor[789] = value
    assert not all_finite([*GOOD, tensor])
    assert not all_finite([tensor.to_sparse(), *GOOD])
    tensor[12] = -value  # two infinities do not cancel out
    assert not all_finite([*GOOD, tensor])


def test_large_values_are_finite_though_their_norm_is_not() -> None:
    assert all_finite([torch.full((100,), 3e38), torch.full((9,), 60000.0, dtype=torch.float16)])
    assert all_finite([torch.full((9,), 1e300, dtype=torch.float64)])


@pytest.mark.parametrize("none", [[], [torch.empty(0)]])
def test_nothing_is_finite(none: list[Tensor]) -> None:
    assert all_finite(none)


def test_the_names() -> None:
    named = {"a": torch.ones(2), "b": torch.tensor([1, torch.nan]), "c": torch.tensor(torch.inf)}
    assert nonfinite_names(named) == ["b", "c"]


# -- what is known of losses and gradients; with several ranks see tests/callbacks/test_skip_non_finite.py ------------


class Steps(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.returned.append(loss.item())
        return loss


def fp16() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]}


@pytest.mark.parametrize(
    "settings", [dict, lambda: {"accumulate_grad_batches": 3}, fp16], ids=["fp32", "window", "fp16"]
)
def test_the_loss_is_what_the_step_returned(settings: Any) -> None:
    module, losses = build(Steps), []
    module.returned = []
    note = LambdaCallback(on_before_backward=lambda run, _, loss: losses.append(true_loss(run, loss).item()))
    fit(module, callbacks=[note], **settings())
    assert losses == pytest.approx(module.returned)
    assert losses


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
