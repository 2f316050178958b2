"""Plans: which of them tell samples apart, and their weights."""

from __future__ import annotations

import pytest
import torch

from lightning_tricks.core.plan import Plan

LAMS = torch.tensor([0.5, 0.75])


def choose(losses: torch.Tensor) -> tuple[torch.Tensor, float]:
    return losses, 1.0


@pytest.mark.parametrize(
    ("plan", "by_samples", "needs_torch_loss"),
    [
        (Plan(), False, False),
        (Plan(0.7), False, False),
        (Plan(LAMS), True, False),
        (Plan(choose=choose), True, True),
        (Plan(record=list[torch.Tensor]().append), True, False),
    ],
    ids=["nothing", "number", "samples", "choose", "record"],
)
def test_kinds(plan, by_samples, needs_torch_loss):
    assert (plan.by_samples, plan.needs_torch_loss) == (by_samples, needs_torch_loss)
    assert (plan.losses, plan.open) == (0, True)


def test_mixed_predictions_need_a_torch_loss():
    plan = Plan(0.7)
    plan.mix_predictions = 0.7, torch.tensor([1, 0])
    assert plan.needs_torch_loss
    assert not plan.by_samples


def test_weights():
    assert Plan().weights(1) == [1.0]
    assert Plan(0.75).weights(2) == [0.75, 0.25]
    assert torch.equal(torch.stack(Plan(LAMS).weights(2)), torch.stack([LAMS, 1 - LAMS]))
