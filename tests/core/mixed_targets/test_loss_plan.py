"""Plans: which of them tell samples apart, and their weights."""

from __future__ import annotations

import pytest
import torch

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan

LAMS = torch.tensor([0.5, 0.75])


def choose(losses: torch.Tensor) -> tuple[torch.Tensor, float]:
    return losses, 1.0


@pytest.mark.parametrize(
    ("plan", "by_samples", "needs_torch_loss"),
    [
        (LossPlan(), False, False),
        (LossPlan(0.7), False, False),
        (LossPlan(LAMS), True, False),
        (LossPlan(choose=choose), True, True),
        (LossPlan(record=list[torch.Tensor]().append), True, False),
    ],
    ids=["nothing", "number", "samples", "choose", "record"],
)
def test_kinds(plan, by_samples, needs_torch_loss):
    assert (plan.by_samples, plan.needs_torch_loss) == (by_samples, needs_torch_loss)
    assert (plan.losses, plan.open) == (0, True)


def test_mixed_predictions_need_a_torch_loss():
    plan = LossPlan(0.7)
    plan.mix_predictions = 0.7, torch.tensor([1, 0])
    assert plan.needs_torch_loss
    assert not plan.by_samples


def test_weights():
    assert LossPlan().weights(1) == [1.0]
    assert LossPlan(0.75).weights(2) == [0.75, 0.25]
    assert torch.equal(torch.stack(LossPlan(LAMS).weights(2)), torch.stack([LAMS, 1 - LAMS]))
