"""The adjusted cross-entropy is that of its formula, sample by sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_tricks.functional import logit_adjustment

PRIOR = torch.tensor([0.7, 0.2, 0.1])


def by_hand(logits: Tensor, targets: Tensor, tau: float) -> float:
    """A sum over samples and classes."""
    losses = []
    for row, y in zip(logits.tolist(), targets.tolist(), strict=True):
        raised = [value + tau * math.log(share) for value, share in zip(row, PRIOR.tolist(), strict=True)]
        losses.append(math.log(sum(map(math.exp, raised))) - raised[y])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0, 2.0])
def test_it_is_the_formula(tau: float) -> None:
    logits, targets = torch.randn(20, 3), torch.randint(3, (20,))
    found = logit_adjustment(logits, targets, PRIOR, tau=tau)
    assert float(found) == pytest.approx(by_hand(logits, targets, tau), rel=1e-5)
    torch.testing.assert_close(logit_adjustment(logits, targets, 1000 * PRIOR, tau=tau), found)  # counts
    images = logits.view(4, 5, 3).movedim(2, 1)
    torch.testing.assert_close(logit_adjustment(images, targets.view(4, 5), PRIOR, tau=tau), found)
    if not tau:
        assert torch.equal(found, F.cross_entropy(logits, targets))


def test_the_gradient_at_equal_logits_is_that_of_the_prior() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    logit_adjustment(logits, torch.tensor([2]), PRIOR).backward()
    torch.testing.assert_close(logits.grad, (PRIOR - F.one_hot(torch.tensor([2]), 3)).float())


def test_a_class_without_samples_is_finite() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    loss = logit_adjustment(logits, torch.tensor([0, 1]), torch.tensor([1, 1, 0]))
    assert loss.item() == pytest.approx(math.log(2), rel=1e-5)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, 2].abs() < 1e-9).all()


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"prior": [0.5, 0.5, 0.0]}, TypeError, "prior must be"),
        ({"prior": torch.ones(2)}, ValueError, r"a share \(C,\) for each class .*, got \(2,\) for \(4, 3\)"),
        ({"logits": torch.zeros(3)}, ValueError, r"got \(3,\) for \(3,\)"),
        ({"tau": -1.0}, ValueError, "tau must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], told: str) -> None:
    given = {"logits": torch.zeros(4, 3), "targets": torch.zeros(4).long(), "prior": PRIOR, **arguments}
    with pytest.raises(error, match=told):
        logit_adjustment(**given)
