"""Torch's losses, mixed and filtered, against sums over the samples and batches of the chosen ones alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.losses import AmbiguousSamples, planned_loss, planned_reduction, sample_ids_of
from lightning_tricks.core.mixed_targets.operations import arguments, is_loss
from lightning_tricks.core.mixed_targets.target import mixed_target
from tests.core.mixed_targets.test_target import (
    ALPHA,
    CASES,
    CHOSEN,
    INDEX,
    LAM,
    LAMS,
    REAL,
    SOME,
    TOKENS,
    B,
    C,
    Case,
    Loss,
    T,
    Y,
    assert_right,
    got,
    known,
    logp,
    one,
    outputs,
    per_token,
)  # fmt: skip

CE, BCE = F.cross_entropy, F.binary_cross_entropy_with_logits
BITS, SHARES, SIGNS = (REAL > 0).float(), REAL.softmax(1), (Y > 1) * 2 - 1
PIXELS = torch.randint(0, C, (B, 4, 4), generator=torch.Generator().manual_seed(2))
PIXELS[0, :2] = 255
EACH = torch.rand(B, C, generator=torch.Generator().manual_seed(4))


def of_pixels(z: Tensor, y: Tensor) -> Tensor:
    return CE(z, y, ignore_index=255, reduction="none").sum((1, 2))


def both(func: Callable[..., Tensor], y: Tensor, form: type[nn.Module], **settings) -> dict[str, Case]:
    """A loss as function and as module, by mean and sum, and without a reduction."""

    def terms(z: Tensor, y: Tensor) -> Tensor:
        return func(z, y, reduction="none", **settings).reshape(B, -1).sum(1)

    def size(y: Tensor) -> int:
        return func(outputs(), y, reduction="none", **settings).numel()

    return {
        f"{func.__name__}, mean": Case(lambda z, y: func(z, y, **settings), y, terms, norm=size),
        f"{func.__name__}, sum": Case(lambda z, y: func(z, y, reduction="sum", **settings), y, terms, norm=one),
        f"{func.__name__}, none": Case(
            lambda z, y: func(z, y, reduction="none", **settings).mean(), y, terms, norm=size
        ),
        form.__name__: Case(form(**settings), y, terms, norm=size),
    }


LOSSES = {
    **both(CE, Y, nn.CrossEntropyLoss, label_smoothing=0.1),
    **both(BCE, BITS, nn.BCEWithLogitsLoss, pos_weight=ALPHA, weight=ALPHA),
    **both(F.mse_loss, REAL, nn.MSELoss),
    **both(F.l1_loss, REAL, nn.L1Loss),
    **both(F.smooth_l1_loss, REAL, nn.SmoothL1Loss, beta=0.5),
    **both(F.huber_loss, REAL, nn.HuberLoss, delta=0.5),
    **both(F.nll_loss, Y, nn.NLLLoss),
    **both(F.multi_margin_loss, Y, nn.MultiMarginLoss),
    **both(F.poisson_nll_loss, SHARES, nn.PoissonNLLLoss),
    "weights": Case(lambda z, y: CE(z, y, ALPHA), Y, lambda z, y: ALPHA[y] * logp(z, y), norm=lambda y: ALPHA[y].sum()),
    "weights, smoothing": Case(
        lambda z, y: CE(z, y, ALPHA, label_smoothing=0.1),
        Y, lambda z, y: CE(z, y, ALPHA, label_smoothing=0.1, reduction="none"), norm=lambda y: ALPHA[y].sum(),
    ),
    "ignored": Case(
        lambda z, y: CE(z, y, ignore_index=-1),
        SOME, lambda z, y: CE(z, y, ignore_index=-1, reduction="none"), norm=known,
    ),
    "segmentation": Case(
        lambda z, y: CE(z, y, ignore_index=255), PIXELS, of_pixels, (B, C, 4, 4), lambda y: (y != 255).sum()
    ),
    "tokens": Case(
        lambda z, y: CE(z.transpose(1, 2), y, ignore_index=-1), TOKENS, per_token, (B, T, C), known
    ),
    "shares": Case(CE, SHARES, lambda z, y: -(y * z.log_softmax(1)).sum(1)),
    "one hot": Case(lambda z, y: CE(z, F.one_hot(y, C).float()), terms=logp),
    "multi-label from classes": Case(
        lambda z, y: BCE(z, F.one_hot(y, C).float()),
        terms=lambda z, y: BCE(z, F.one_hot(y, C).float(), reduction="none").mean(1),
    ),
    "probabilities": Case(
        lambda z, y: F.binary_cross_entropy(z.sigmoid(), y), BITS, lambda z, y: BCE(z, y, reduction="none").mean(1)
    ),
    "weights of entries": Case(
        lambda z, y: BCE(z, y, EACH), BITS, lambda z, y: (EACH * BCE(z, y, reduction="none")).mean(1)
    ),
    "batchmean": Case(
        lambda z, y: F.kl_div(z.log_softmax(1), y, reduction="batchmean"), SHARES,
        lambda z, y: F.kl_div(z.log_softmax(1), y, reduction="none").sum(1),
    ),
    "the other way round": Case(lambda z, y: F.mse_loss(y, z), REAL, lambda z, y: (z - y).square().mean(1)),
    "two predictions": Case(
        lambda z, y: F.margin_ranking_loss(z[:, 0], z[:, 1], y, margin=1.0), SIGNS,
        lambda z, y: F.margin_ranking_loss(z[:, 0], z[:, 1], y, margin=1.0, reduction="none"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_mixed(name):
    assert_right(LOSSES[name])
    assert_right(LOSSES[name], LAMS)


def test_signed_losses_that_cancel():
    z = torch.randn(64, C, generator=torch.Generator().manual_seed(0))
    z = (z - z[:, 0].mean()).requires_grad_()
    y, lam = torch.zeros(64, dtype=torch.long), torch.linspace(0.5, 1.0, 64)
    loss = F.nll_loss(z, mixed_target([y, y], LossPlan(lam)))
    torch.testing.assert_close(torch.autograd.grad(loss, z)[0][:, 0], torch.full((64,), -1 / 64))


# -- chosen samples ---------------------------------------------------------------------------------------------------


def chosen_gradient(loss: Loss, y: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The gradient where some samples are chosen, and the losses that they were chosen by."""
    z, seen = outputs(shape), list[Tensor]()

    def choose(losses: Tensor) -> tuple[Tensor, float]:
        seen.append(losses)
        return CHOSEN, 1.0

    plan = LossPlan(choose=choose)
    loss(z, mixed_target([y.clone()], plan)).backward()
    assert plan.losses == 1
    assert z.grad is not None
    return z.grad, seen[0]


WHOLE = {
    **LOSSES,
    **{f"{name}, by hand": CASES[name] for name in ("written", "focal", "where", "token mean", "by hand")},
}
FIXED = {"weights of entries"}  # entries of the whole batch
WEIGHTED = {"weights", "weights, smoothing"}  # a sample alone is divided by its own weight
OF_NO_LOSS = {name for name in WHOLE if name.endswith(", sum")} | {
    f"{n}, by hand" for n in ("written", "where", "by hand")
}
CHOOSABLE = [name for name in WHOLE if name not in FIXED | OF_NO_LOSS]


@pytest.mark.parametrize("name", CHOOSABLE)
def test_loss_of_the_chosen_is_that_of_a_batch_of_them(name):
    case, z = WHOLE[name], outputs(WHOLE[name].shape)
    wanted = torch.autograd.grad(case.loss(z[CHOSEN], case.y[CHOSEN].clone()), z)[0]
    torch.testing.assert_close(chosen_gradient(case.loss, case.y, case.shape)[0], wanted, atol=1e-6, rtol=1e-5)


def losses_one_by_one(case: Case) -> Tensor:
    z = outputs(case.shape)
    losses = torch.stack([case.loss(z[i : i + 1], case.y[i : i + 1].clone()) for i in range(B)]).detach()
    return losses.nan_to_num(nan=-torch.inf)  # all of it ignored


@pytest.mark.parametrize("name", [name for name in CHOOSABLE if name not in WEIGHTED])
def test_samples_are_compared_by_their_losses(name):
    case = WHOLE[name]
    losses, seen = losses_one_by_one(case), chosen_gradient(case.loss, case.y, case.shape)[1]
    order = lambda losses: losses.argsort().tolist()  # noqa: E731
    assert order(seen[losses > -torch.inf]) == order(losses[losses > -torch.inf])
    assert (seen[losses == -torch.inf] == -torch.inf).all() or name == "token mean, by hand"


RAISE = {
    **{name: WHOLE[name] for name in sorted(OF_NO_LOSS)},
    "sum by number": Case(lambda z, y: CE(z, y, reduction="sum") / len(y)),
    "sum by hand": Case(lambda z, y: CE(z, y, reduction="none").sum() / len(y)),
    "masked mean": CASES["masked mean"],
    "axis": Case(lambda z, y: -(F.one_hot(y, C) * z.log_softmax(1)).sum(axis=1).mean()),
    "negated": Case(lambda z, y: logp(z, y).mean()),
    "similarity": Case(lambda z, y: 1 - F.cosine_similarity(z, y).mean(), REAL),
    "one by one": Case(lambda z, y: torch.stack([CE(z[i : i + 1], y[i : i + 1]) for i in range(len(y))]).mean()),
    "a part": Case(lambda z, y: CE(z[:4], y[:4])),
    "micro-batches": CASES["micro-batches"],
    "triplet": CASES["triplet"],
    "dice": CASES["dice"],
}


@pytest.mark.parametrize("name", RAISE)
def test_choosing_raises_where_it_could_be_wrong(name):
    with pytest.raises(MisconfigurationException):
        chosen_gradient(RAISE[name].loss, RAISE[name].y, RAISE[name].shape)


def test_choosing_by_a_loss_without_target():
    z = outputs()
    wanted = torch.autograd.grad(F.triplet_margin_loss(REAL[CHOSEN], z[CHOSEN], -z[CHOSEN]), z)[0]
    got = chosen_gradient(lambda z, y: F.triplet_margin_loss(y, z, -z), REAL, (B, C))[0]
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["cross_entropy, mean", "segmentation", "tokens", "ignored", "focal, by hand"])
def test_record_is_told_the_losses_and_changes_nothing(name):
    case, z, seen = WHOLE[name], outputs(WHOLE[name].shape), list[Tensor]()
    case.loss(z, mixed_target([case.y.clone()], LossPlan(record=seen.append))).backward()
    again = outputs(case.shape)
    torch.testing.assert_close(z.grad, torch.autograd.grad(case.loss(again, case.y.clone()), again)[0])
    losses = losses_one_by_one(case)
    assert len(seen) == 1
    assert seen[0].shape == (B,)
    assert not seen[0].requires_grad
    assert seen[0].argsort().tolist() == losses.argsort().tolist()


# -- predictions mixed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(CE),
        Case(F.mse_loss, REAL),
        Case(nn.BCEWithLogitsLoss(), BITS),
        Case(lambda z, y: F.mse_loss(y, z), REAL),
        Case(lambda z, y: (z - y).pow(2).mean(), REAL),
    ],
    ids=["cross entropy", "mse", "bce", "swapped", "by hand"],
)
def test_mixed_predictions(case):
    z, again, plan = outputs(), outputs(), LossPlan(LAM)
    plan.mix_predictions = LAM, INDEX
    mixed = LAM * z + (1 - LAM) * z[INDEX]
    wanted = torch.autograd.grad(LAM * case.loss(mixed, case.y) + (1 - LAM) * case.loss(mixed, case.y[INDEX]), z)[0]
    try:
        case.loss(again, mixed_target([case.y, case.y[INDEX]], plan)).backward()
    except MisconfigurationException:  # which is for what is made by hand
        assert case.y is REAL
    else:
        torch.testing.assert_close(again.grad, wanted, atol=1e-6, rtol=1e-5)


# -- the functions themselves -----------------------------------------------------------------------------------------


def test_is_loss():
    assert all(map(is_loss, (CE, F.nll_loss, F.mse_loss, F.kl_div, F.huber_loss, F.ctc_loss)))
    assert not any(map(is_loss, (F.softmax, torch.mean, Tensor.sum, F.one_hot, lambda z, y, reduction: z)))


def test_arguments():
    z = outputs()
    assert arguments(CE, (z, Y), {"reduction": "sum"}) == arguments(CE, (z,), {"target": Y, "reduction": "sum"})
    assert arguments(CE, (z, Y), {})["reduction"] == "mean"


def calls(z: Tensor, reduction: str = "mean") -> list[dict]:
    return [arguments(CE, (z, y), {"reduction": reduction}) for y in (Y, Y[INDEX])]


def each(z: Tensor) -> list[Tensor]:
    return [CE(z, y, reduction="none") for y in (Y, Y[INDEX])]


def plan_of(lam: float | Tensor, **settings: Any) -> LossPlan:
    plan = LossPlan(lam, **settings)
    plan.samples = B
    return plan


def test_loss_by_samples_of_a_part():
    z, owners = outputs()[:3], torch.tensor([4, 0, 4])
    parts = [arguments(CE, (z, y[:3]), {}) for y in (Y, Y[INDEX])]
    loss = planned_loss(CE, parts, owners, plan_of(LAMS))
    own, other = (CE(z, y[:3], reduction="none") for y in (Y, Y[INDEX]))
    torch.testing.assert_close(loss, (LAMS[owners] * own + (1 - LAMS[owners]) * other).mean())


def test_a_factor_of_those_that_choose():
    z, plan = outputs(), plan_of(LAM, choose=lambda losses: (CHOSEN, 0.5))
    loss, (own, other) = planned_loss(CE, calls(z), torch.arange(B), plan), each(z)
    torch.testing.assert_close(loss, 0.5 * (LAM * own + (1 - LAM) * other)[CHOSEN].mean())


def test_sum_by_samples():
    own, other = each(outputs())
    mixed = LAMS * own + (1 - LAMS) * other
    for func in (torch.sum, Tensor.mean):
        loss = planned_reduction(func, [((own,), {}), ((other,), {})], torch.arange(B), plan_of(LAMS))
        torch.testing.assert_close(loss, func(mixed))
    plan = plan_of(LAM, choose=lambda losses: (CHOSEN, 0.5))
    loss = planned_reduction(torch.mean, [((own,), {})], torch.arange(B), plan)
    torch.testing.assert_close(loss, 0.5 * LAM * own[CHOSEN].mean())


@pytest.mark.parametrize("owners", [None, torch.arange(B - 1)])
def test_unknown_owners_raise(owners):
    with pytest.raises(AmbiguousSamples, match="not clear which sample"):
        planned_loss(CE, calls(outputs()), owners, plan_of(LAMS))
    with pytest.raises(AmbiguousSamples, match="not clear which sample"):
        planned_reduction(torch.sum, [((value,), {}) for value in each(outputs())], owners, plan_of(LAMS))


def test_mean_of_zero():
    shift = torch.tensor([1.0, -1.0]).repeat(3)[:, None]
    loss = lambda z, y: F.nll_loss(z - z.detach() + shift, y)  # noqa: E731
    assert_right(Case(loss, terms=lambda z, y: -z[torch.arange(B), y]), LAMS)


def test_ctc_raises():  # its mean divides each sample by the length of its own target
    lengths, y = torch.tensor([2, 1, 3, 2, 1, 3]), Y.view(B, 1).expand(B, 3) % (C - 1) + 1
    case = Case(lambda z, y: F.ctc_loss(z.log_softmax(2), y, torch.full((B,), B), lengths), y, shape=(B, B, C))
    assert_right(case)
    with pytest.raises(MisconfigurationException, match="ctc_loss"):
        got(case, LAMS)


# -- the entries of a result keep their samples, are moved with them, or it is not clear; losses are in test_losses.py


SAMPLES, LABELS = torch.arange(3), torch.tensor([[1, 2], [3, 4], [5, 6]])


def follow(func, *rest, moved=True, argument=LABELS, **kwargs):
    result = func(argument, *rest, **kwargs)
    return sample_ids_of(func, [((argument, *rest), kwargs)], [result], [(SAMPLES, argument.ndim)], moved)


@pytest.mark.parametrize(
    ("func", "rest", "expected"),
    [
        (torch.Tensor.flatten, (), [0, 0, 1, 1, 2, 2]),
        (torch.Tensor.view, (-1,), [0, 0, 1, 1, 2, 2]),
        (torch.Tensor.flip, ((0,),), [2, 1, 0]),
        (torch.Tensor.__getitem__, (torch.tensor([2, 0]),), [2, 0]),
        (torch.Tensor.__getitem__, ((slice(None), 1),), [0, 1, 2]),
        (torch.Tensor.t, (), None),
        (torch.Tensor.reshape, (2, 3), None),
    ],
)
def test_owners_are_moved_with_the_entries(func, rest, expected):
    found = follow(func, *rest)
    assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize(
    ("shape", "times"),
    [((-1,), 4), ((3, 4), 1), ((6, 2), 2), ((12, 1), 4), ((3, 2, 2), 1), ((2, 6), None), ((1, 12), None)],
)
def test_owners_of_a_reshaped_tensor_are_known_without_a_look_at_them(shape, times):
    plan = LossPlan(torch.ones(3))
    labels, ids = torch.arange(12).view(3, 4), plan.number_samples(3, torch.device("cpu"))
    for before, moved in (
        (labels, ids),
        (labels.flatten(), plan.repeated_ids(4)),
        (labels.view(6, 2), plan.repeated_ids(2)),
    ):
        result = before.reshape(shape)
        call = [((before, shape), {})]
        looked = sample_ids_of(torch.Tensor.reshape, call, [result], [(moved.clone(), before.ndim)], True, plan)
        found = sample_ids_of(torch.Tensor.reshape, call, [result], [(moved, before.ndim)], True, plan)
        assert (None if found is None else found.tolist()) == (None if looked is None else looked.tolist())
        assert found is (None if times is None else plan.repeated_ids(times))


def test_owners_are_kept_entry_by_entry_but_not_through_broadcasting_or_an_order():
    assert follow(torch.add, 1, moved=False).tolist() == [0, 1, 2]
    assert follow(torch.mul, torch.ones(3, 3, 2), moved=False) is None
    assert follow(torch.matmul, torch.ones(2, 2, dtype=torch.long), moved=False) is None


def test_branches_that_are_moved_apart_belong_to_nobody():
    masks = [torch.tensor([True, True, False]), torch.tensor([False, True, True])]
    calls = [((LABELS, mask), {}) for mask in masks]
    results = [LABELS[mask] for mask in masks]
    assert sample_ids_of(torch.Tensor.__getitem__, calls, results, [(SAMPLES, 2)], True) is None
