"""By what the means of torch's losses are divided: the sum of their entries over it is the mean."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_tricks.core.mixed_targets.divisors import SUMMED, Divisors
from lightning_tricks.core.mixed_targets.operations import arguments, is_loss

N, C = 6, 4
LABELS = torch.tensor([0, 3, -100, 1, 1, -100])
CLASS_WEIGHTS = torch.arange(1.0, C + 1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).clamp(0.01, 0.99)


def logits(*shape: int) -> Tensor:
    return numbers(*(shape or (N, C))).requires_grad_()


CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "ignored": (F.cross_entropy, (logits(), LABELS), {}),
    "class weights": (F.cross_entropy, (logits(), LABELS), {"weight": CLASS_WEIGHTS}),
    "another label": (F.cross_entropy, (logits(), LABELS.clamp(min=0)), {"ignore_index": 0}),
    "images": (F.cross_entropy, (logits(2, C, 3), LABELS.view(2, 3)), {}),
    "one sample": (F.cross_entropy, (logits(C), torch.tensor(2)), {}),
    "probabilities": (F.cross_entropy, (logits(), numbers(N, C).softmax(1)), {}),
    "nll_loss": (F.nll_loss, (logits(), LABELS), {"weight": CLASS_WEIGHTS}),
    "batchmean": (F.kl_div, (logits(), numbers(N, C)), {"reduction": "batchmean"}),
    "gaussian_nll_loss": (F.gaussian_nll_loss, (logits(), numbers(N, C), numbers(N, C)), {}),
    "hinge_embedding_loss": (F.hinge_embedding_loss, (logits(), numbers(N, C).round() * 2 - 1), {}),
    "multi_margin_loss": (F.multi_margin_loss, (logits(), LABELS.clamp(min=0)), {}),
    "multilabel_margin_loss": (F.multilabel_margin_loss, (logits(), numbers(N, C).argsort(1)), {}),
    "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, (logits(), numbers(N, C).round()), {}),
    **{
        name: (getattr(F, name), (logits(), numbers(N, C, seed=1)), {})
        for name in (
            *("binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss"),
            *("mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss"),
        )
    },
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # of kl_div, which is meant
@pytest.mark.parametrize("name", CASES)
def test_the_sum_over_the_divisor_is_the_mean(name: str) -> None:
    func, args, kwargs = CASES[name]
    divisors = Divisors(-100)
    assert divisors.note_loss(func, arguments(func, args, kwargs)) == ""
    (divisor,) = divisors.found.values()
    total = func(*args, **{**kwargs, "reduction": "none"}).sum()
    torch.testing.assert_close(total / divisor, func(*args, **kwargs))


def test_all_other_losses_do_not_say_it() -> None:
    known = {func for func, _, _ in CASES.values()}
    others = {name: func for name, func in vars(F).items() if inspect.isfunction(func) and is_loss(func)}
    for name, func in others.items():
        if func not in known:
            call = {each: logits() for each in inspect.signature(func).parameters} | {"reduction": "mean"}
            assert name in Divisors(-100).note_loss(func, call)


def test_a_loss_counts_once_and_one_that_is_logged_does_not() -> None:
    divisors, x = Divisors(-100), logits()
    for _ in range(2):
        divisors.note_loss(F.cross_entropy, arguments(F.cross_entropy, (x, LABELS), {}))
    divisors.note_loss(F.cross_entropy, arguments(F.cross_entropy, (x.detach()[:2], LABELS[:2]), {}))
    with torch.no_grad():
        divisors.note_loss(F.cross_entropy, arguments(F.cross_entropy, (x[:3], LABELS[:3]), {}))
    assert [int(each) for each in divisors.found.values()] == [4]


def test_the_target_may_come_first() -> None:
    divisors, x, y = Divisors(-100), logits(), numbers(N, C)
    assert divisors.note_loss(F.mse_loss, arguments(F.mse_loss, (y, x), {})) == ""
    assert [int(each) for each in divisors.found.values()] == [N * C]


def test_means_and_divisions_by_hand() -> None:
    divisors, losses = Divisors(-100), logits(N)
    assert divisors.note_reduction(torch.mean, losses, losses.mean()) == ""
    assert divisors.note_reduction(torch.sum, losses, losses.sum()) == SUMMED
    assert "amax() of losses is no mean" in divisors.note_reduction(torch.amax, losses, losses.amax())
    assert divisors.note_reduction(torch.sum, logits(), logits().sum(1)) == ""  # of classes
    assert divisors.note_division(torch.tensor(3)) == ""
    call = arguments(F.cross_entropy, (logits(), LABELS), {"reduction": "sum"})
    assert divisors.note_loss(F.cross_entropy, call) == SUMMED
    assert divisors.note_division(4) == ""
    assert "divided by 5, which is not the number of the labels" in divisors.note_division(5)
    assert [int(each) for each in divisors.found.values()] == [N, 0, 4]  # there were no labels at first
