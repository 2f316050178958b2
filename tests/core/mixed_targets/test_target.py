"""Targets that know: every way to compute a loss, against the losses of both labels computed apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm.loss
import torch
import torch.nn.functional as F
import torchmetrics as tm
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.target import MixedTarget, mixed_target, returned_loss

B, C, T = 6, 5, 4
LAM, LAMS, CHOSEN = 0.7, torch.linspace(0.5, 0.95, B), torch.tensor([1, 2, 5])
INDEX = torch.tensor([3, 0, 4, 1, 5, 2])
Y = torch.tensor([0, 1, 2, 3, 4, 1])
SOME = torch.tensor([0, -1, 2, 3, -1, 1])  # labels that are partly unknown
TOKENS = torch.tensor([[1, 2, -1, -1], [1, 1, 1, -1], [2, 0, 3, 4], [2, -1, -1, -1], [1, 3, -1, -1], [0, 1, 2, -1]])
REAL = torch.randn(B, C, generator=torch.Generator().manual_seed(5))
ALPHA = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])
Loss = Callable[[Tensor, Tensor], Tensor]
CE = F.cross_entropy


class Case(NamedTuple):
    """A loss, the terms of its samples (B,), and what their sum is divided by."""

    loss: Loss
    y: Tensor = Y
    terms: Loss | None = None
    shape: tuple[int, ...] = (B, C)
    norm: Callable[[Tensor], Any] = len


def outputs(shape: tuple[int, ...] = (B, C)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def wanted(case: Case, lam: float | Tensor = LAM) -> Tensor:
    """The gradient by the definition, from plain labels."""
    z = outputs(case.shape)
    if isinstance(lam, Tensor):
        assert case.terms is not None
        own, other = case.terms(z, case.y), case.terms(z, case.y[INDEX])
        loss = (lam * own).sum() / case.norm(case.y) + ((1 - lam) * other).sum() / case.norm(case.y[INDEX])
    else:
        loss = lam * case.loss(z, case.y.clone()) + (1 - lam) * case.loss(z, case.y[INDEX])
    return torch.autograd.grad(loss, z)[0]


def got(case: Case, lam: float | Tensor = LAM) -> Tensor:
    """The gradient of the user's loss."""
    z, plan = outputs(case.shape), LossPlan(lam)
    case.loss(z, mixed_target([case.y.clone(), case.y[INDEX]], plan)).backward()
    assert plan.losses, "would raise at the end of the batch"
    assert z.grad is not None
    return z.grad


def assert_right(case: Case, lam: float | Tensor = LAM, unknown: bool = False) -> None:
    """The loss is mixed, or, where that is allowed, there is an error."""
    try:
        gradient = got(case, lam)
    except MisconfigurationException:
        if not unknown:
            raise
    else:
        torch.testing.assert_close(gradient, wanted(case, lam), atol=1e-6, rtol=1e-5)


def logp(z: Tensor, y: Tensor) -> Tensor:
    """What a negative log-likelihood is written as by hand."""
    return -z.log_softmax(1)[torch.arange(len(y)), y]


def onehot_loss(onehot: Tensor, z: Tensor) -> Tensor:
    return -(onehot * z.log_softmax(1)).sum(1).mean()


def plain(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none", ignore_index=-1)


def token_loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), y, reduction="none", ignore_index=-1)


def per_token(z: Tensor, y: Tensor) -> Tensor:
    return token_loss(z, y).sum(1)


def token_mean(z: Tensor, y: Tensor) -> Tensor:
    return token_loss(z, y).sum(1) / (y >= 0).sum(1)


def one(y: Tensor) -> int:
    return 1


def focal(z: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(z, y, reduction="none")
    return ALPHA[y] * (1 - torch.exp(-loss)) ** 2 * loss


def sigmoid_focal(z: Tensor, y: Tensor) -> Tensor:  # as in torchvision
    p, loss = torch.sigmoid(z), F.binary_cross_entropy_with_logits(z, y, reduction="none")
    loss = loss * ((1 - (p * y + (1 - p) * (1 - y))) ** 2)
    return (0.25 * y + 0.75 * (1 - y)) * loss


def smoothed(z: Tensor, y: Tensor, through_return: bool) -> Tensor:
    with torch.no_grad():
        smooth = torch.full_like(z, 0.1 / (C - 1))
        returned = smooth.scatter_(1, y.unsqueeze(1), 0.9)
    return onehot_loss(returned if through_return else smooth, z)


def smoothed_terms(z: Tensor, y: Tensor) -> Tensor:
    onehot = F.one_hot(y, C)
    return -((0.9 * onehot + 0.1 / (C - 1) * (1 - onehot)) * z.log_softmax(1)).sum(1)


def written(z: Tensor, y: Tensor) -> Tensor:
    onehot = torch.zeros(len(y), C)
    onehot[torch.arange(len(y)), y] = 1
    return onehot_loss(onehot, z)


def in_place(z: Tensor, y: Tensor) -> Tensor:
    y[y == -1] = -100
    return F.cross_entropy(z, y)


def dice(z: Tensor, y: Tensor) -> Tensor:
    p, onehot = z.softmax(1), F.one_hot(y, C)
    return 1 - 2 * (p * onehot).sum() / (p.sum() + onehot.sum())


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    same = (y[:, None] == y[None, :]) & ~torch.eye(len(y)).bool()
    return -(same * (z @ z.T).log_softmax(1)).sum(1) / same.sum(1).clamp(min=1)


def triplet(z: Tensor, y: Tensor) -> Tensor:
    same, distance = (y[:, None] == y[None, :]).float(), torch.cdist(z, z)
    return F.relu((distance * same).max(1)[0] - (distance + 1e3 * same).min(1)[0] + 0.2)


def known(y: Tensor) -> Tensor:
    return (y >= 0).sum()


def timm_case(loss: nn.Module, y: Tensor = Y) -> Case:
    return Case(loss, y, lambda z, y: torch.stack([loss(z[i : i + 1], y[i : i + 1]) for i in range(B)]))


CASES = {
    "one hot": Case(lambda z, y: onehot_loss(F.one_hot(y, C), z), terms=logp),
    "gather": Case(lambda z, y: -z.log_softmax(1).gather(1, y.view(-1, 1)).squeeze(1).mean(), terms=logp),
    "index": Case(lambda z, y: logp(z, y).mean(), terms=logp),
    "eye": Case(lambda z, y: onehot_loss(torch.eye(C)[y], z), terms=logp),
    "compare": Case(lambda z, y: onehot_loss((y[:, None] == torch.arange(C)).float(), z), terms=logp),
    "where": Case(
        lambda z, y: torch.where(y[:, None] == torch.arange(C), -z, z.exp()).sum() / B,
        terms=lambda z, y: torch.where(F.one_hot(y, C).bool(), -z, z.exp()).sum(1),
    ),
    "written": Case(written, terms=logp),
    "smoothing, returned": Case(lambda z, y: smoothed(z, y, True), terms=smoothed_terms),
    "smoothing, written": Case(lambda z, y: smoothed(z, y, False), terms=smoothed_terms),
    "focal": Case(lambda z, y: focal(z, y).mean(), terms=focal),
    "sigmoid focal": Case(
        lambda z, y: sigmoid_focal(z, y).sum(), (REAL > 0).float(), lambda z, y: sigmoid_focal(z, y).sum(1), norm=one
    ),
    "mask": Case(lambda z, y: CE(z[y >= 0], y[y >= 0]), SOME),
    "masked mean": Case(lambda z, y: (plain(z, y) * (y >= 0)).sum() / (y >= 0).sum(), SOME, plain, norm=known),
    "in place": Case(in_place, SOME, plain, norm=known),
    "tokens": Case(
        lambda z, y: CE(z.reshape(-1, C), y.reshape(-1), ignore_index=-1), TOKENS, per_token, (B, T, C), known
    ),
    "tokens, flat": Case(
        lambda z, y: CE(z.flatten(0, 1), y.flatten(), ignore_index=-1), TOKENS, per_token, (B, T, C), known
    ),
    "tokens, view": Case(
        lambda z, y: CE(z.view(-1, C), y.view(-1), ignore_index=-1), TOKENS, per_token, (B, T, C), known
    ),
    "tokens, shifted": Case(
        lambda z, y: CE(z[:, :-1].reshape(-1, C), y[:, 1:].reshape(-1), ignore_index=-1), TOKENS,
        lambda z, y: per_token(z[:, :-1], y[:, 1:]), (B, T, C), lambda y: known(y[:, 1:]),
    ),
    "token mean": Case(lambda z, y: token_mean(z, y).mean(), TOKENS, token_mean, (B, T, C)),
    "dice": Case(dice),
    "contrastive": Case(lambda z, y: contrastive(z, y).mean(), terms=contrastive),
    "triplet": Case(lambda z, y: triplet(z, y).mean(), terms=triplet),
    "loop of classes": Case(lambda z, y: sum((CE(z[y == c], y[y == c]) for c in y.unique()), torch.tensor(0.0))),
    "micro-batches": Case(lambda z, y: CE(z[:2], y[:2]) / 3 + CE(z[2:], y[2:]) * 2 / 3, terms=logp),
    "heads": Case(lambda z, y: CE(z, y) + 0.5 * CE(2 * z, y), terms=lambda z, y: logp(z, y) + 0.5 * logp(2 * z, y)),
    "stack": Case(
        lambda z, y: CE(torch.stack([z, -z], 2), torch.stack([y, y], 1)),
        terms=lambda z, y: (logp(z, y) + logp(-z, y)) / 2,
    ),
    "cat": Case(lambda z, y: CE(torch.cat([z, -z]), torch.cat([y, y]))),
    "transposed": Case(
        lambda z, y: CE(z.transpose(0, 1).flatten(0, 1), y.T.flatten(), ignore_index=-1), TOKENS, shape=(B, T, C)
    ),
    "conversions": Case(lambda z, y: CE(z, y.data.detach().to(torch.int32).long().clone().cpu()), terms=logp),
    "arithmetic": Case(
        lambda z, y: F.mse_loss(z, (y * 2 - 1.0) / 3), REAL, lambda z, y: (z - (2 * y - 1) / 3).square().mean(1)
    ),
    "by hand": Case(lambda z, y: (z - y).pow(2).sum(1).mean(), REAL, lambda z, y: (z - y).square().sum(1)),
    "norm": Case(lambda z, y: (z - y).norm(), REAL),
    "embedding": Case(
        lambda z, y: (z * F.embedding(y, torch.eye(C))).pow(2).mean(),
        terms=lambda z, y: (z * F.one_hot(y, C)).pow(2).mean(1),
    ),
    "class weights": Case(
        lambda z, y: CE(z, y, torch.bincount(y, minlength=C).float()),
        terms=lambda z, y: torch.bincount(y, minlength=C)[y] * logp(z, y),
        norm=lambda y: torch.bincount(y, minlength=C)[y].sum(),
    ),
    "timm smoothing": timm_case(timm.loss.LabelSmoothingCrossEntropy(0.1)),
    "timm soft": timm_case(timm.loss.SoftTargetCrossEntropy(), REAL.softmax(1)),
    "timm bce": timm_case(timm.loss.BinaryCrossEntropy(0.1)),
    "timm bce, threshold": timm_case(timm.loss.BinaryCrossEntropy(0.1, target_threshold=0.2)),
}  # fmt: skip


PAIRS = {"contrastive", "triplet"}  # of samples, which may be an error where they have different weights


@pytest.mark.parametrize("name", CASES)
def test_loss_is_mixed(name):
    assert_right(CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.terms is not None])
def test_samples_are_mixed_each_by_its_weight(name):
    assert_right(CASES[name], LAMS, unknown=name in PAIRS)


@pytest.mark.parametrize("name", ["cat", "norm", "transposed"])
def test_unclear_samples_are_an_error(name):
    with pytest.raises(MisconfigurationException, match="not clear which sample"):
        got(CASES[name], LAMS)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_loss(backend):
    case = Case(torch.compile(lambda z, y: onehot_loss(F.one_hot(y, C), z), backend=backend), terms=logp)
    assert_right(case)
    assert_right(case, LAMS)


# -- what is no loss --------------------------------------------------------------------------------------------------


def target(lam: float | Tensor = LAM) -> MixedTarget:
    return mixed_target([Y.clone(), Y[INDEX]], LossPlan(lam))


def test_it_looks_like_the_first_labels():
    y = target()
    assert int(y[1]) == 1
    assert y.tolist() == y.numpy().tolist() == [*map(int, y)] == Y.tolist()
    assert (y.shape, y.dtype, y.device, len(y)) == (Y.shape, Y.dtype, Y.device, B)
    assert bool((y == Y).all())
    assert y.plan.losses == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda y: pickle.loads(pickle.dumps(y))])
def test_copies_are_plain(copied):
    y = copied(target())
    assert type(y) is Tensor
    assert torch.equal(y, Y)


def test_it_is_plain_once_its_batch_is_over():
    y, z = target(), outputs()
    onehot = F.one_hot(y, C)
    y.plan.open = False
    for each in (y + 0, onehot.argmax(1), torch.zeros(B).long().copy_(y)):
        assert type(each) is Tensor
        assert torch.equal(each, Y)
    assert torch.equal(CE(z, y), CE(z, Y))


def test_soft_targets_agree_where_theory_says_so():
    z, weight = outputs(), ALPHA
    soft = LAM * F.one_hot(Y, C) + (1 - LAM) * F.one_hot(Y[INDEX], C)
    for smoothing in (0.0, 0.1):
        torch.testing.assert_close(CE(z, target(), label_smoothing=smoothing), CE(z, soft, label_smoothing=smoothing))
    assert not torch.isclose(CE(z, target(), weight), CE(z, soft, weight), rtol=1e-3)


METRICS = {
    "micro": lambda: tm.Accuracy("multiclass", num_classes=C, average="micro"),
    "macro": lambda: tm.Accuracy("multiclass", num_classes=C, average="macro"),
    "f1": lambda: tm.F1Score("multiclass", num_classes=C),
    "confusion": lambda: tm.ConfusionMatrix("multiclass", num_classes=C),
    "auroc": lambda: tm.AUROC("multiclass", num_classes=C),
    "auroc, binned": lambda: tm.AUROC("multiclass", num_classes=C, thresholds=10),
    "mean": tm.MeanMetric,
    "mse": tm.MeanSquaredError,
}


@pytest.mark.parametrize("lam", [LAM, LAMS], ids=["scalar", "samples"])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_those_of_the_labels(name, lam):
    metrics = METRICS[name](), METRICS[name](), METRICS[name](), METRICS[name]()
    for seed in range(3):
        z = torch.randn(B, C, generator=torch.Generator().manual_seed(seed))
        y = target(lam)
        for metric, labels, forward in zip(metrics, (y, Y, y, Y), (False, False, True, True), strict=True):
            values = {"mean": (labels.float(),), "mse": (z[:, 0], labels.float())}.get(name, (z.softmax(1), labels))
            metric(*values) if forward else metric.update(*values)
        y.plan.open = False
    for metric in (*metrics, copy.deepcopy(metrics[0]), pickle.loads(pickle.dumps(metrics[2]))):
        torch.testing.assert_close(metric.compute(), metrics[1].compute(), rtol=0, atol=0)
    metrics[0].reset()
    metrics[0].update(*values)


# -- what is done with a loss ------------------------------------------------------------------------------------------


def added(loss: Tensor, more: Tensor) -> Tensor:
    total = 0
    for each in (loss, more):
        total += each
    return total


def halved(loss: Tensor) -> Tensor:
    loss /= 2
    return loss


USES: dict[str, tuple[Callable[[Tensor, Tensor], Any], float]] = {
    "backward": (lambda z, loss: loss.backward(torch.tensor(2.0), inputs=[z]), 2),
    "twice": (lambda z, loss: (loss.backward(retain_graph=True), loss.backward()), 2),
    "torch.autograd.backward": (lambda z, loss: torch.autograd.backward([loss, 0 * z.sum()]), 1),
    "torch.autograd.grad": (lambda z, loss: setattr(z, "grad", torch.autograd.grad([loss], [z])[0]), 1),
    "scaler": (lambda z, loss: torch.amp.GradScaler("cpu", init_scale=4.0).scale(loss).backward(), 4),
    "list": (lambda z, loss: torch.stack([loss, 2 * loss]).mean().backward(), 1.5),
    "converted": (lambda z, loss: loss.double().clone().view(1).sum().backward(), 1),
    "total of a number": (lambda z, loss: added(loss, 2 * loss).backward(), 3),
    "penalty": (lambda z, loss: added(0 * z.sum(), loss).backward(), 1),
    "in place": (lambda z, loss: halved(loss).backward(), 0.5),
    "in place, then divided": (lambda z, loss: (halved(loss) / 2).backward(), 0.25),  # as Lightning does
    "mul_": (lambda z, loss: loss.mul_(2).backward(), 2),
}


@pytest.mark.parametrize("name", USES)
def test_use_of_a_loss(name):
    z, (use, factor) = outputs(), USES[name]
    use(z, CE(z, target()))
    torch.testing.assert_close(z.grad, factor * wanted(Case(CE)), atol=1e-6, rtol=1e-5)


def test_a_loss_for_the_record():
    z, y = outputs(), target()
    loss, expected = CE(z, y), LAM * CE(z, Y) + (1 - LAM) * CE(z, Y[INDEX])
    with torch.no_grad():
        total = torch.zeros(())
        total += loss
        ungraded = CE(z, y)
    for value in (loss, loss.detach(), loss.data, loss.detach().cpu(), total, ungraded, 2 * ungraded / 2):
        torch.testing.assert_close(value.item(), expected.item())
    assert {type(each) for each in (loss.detach(), loss.data, total, loss.isnan())} == {Tensor}
    kept = [loss.detach(), loss]
    y.plan.open = False
    assert type(torch.stack(kept)) is type(loss * 2) is Tensor
    torch.testing.assert_close(torch.stack(kept).mean().item(), expected.item())


def test_a_function_that_writes_may_be_called_by_keywords_once_the_batch_is_done():
    y = target()
    y.plan.open = False
    assert torch.nn.init.zeros_(tensor=y) is y
    assert (y.as_subclass(Tensor) == 0).all()


def test_value_of_a_total():
    loss = CE(outputs(), target())
    torch.testing.assert_close(added(loss, 2 * loss).item(), 3 * CE(outputs(), target()).item())


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": Tensor.item,
    "tolist": Tensor.tolist,
    "float": float,
    "int": int,
    "bool": bool,
    "format": "{:.3f}".format,
    "numpy": lambda loss: loss.detach().numpy(),
    "isclose": lambda loss: torch.allclose(loss, loss.detach()),
}


class Counted(TorchDispatchMode):
    """Counts the operations that wait for a device: those that bring a value to Python."""

    waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", READS)
def test_reading_a_loss_waits_as_often_as_reading_a_plain_one(name):
    waits = []
    for y in (target(), Y):
        loss = CE(outputs(), y)
        with Counted() as counted:
            READS[name](loss)
        waits.append(counted.waits)
    assert waits[0] == waits[1]
    assert waits[0] == 1 or name not in ("item", "float", "int", "bool", "format")


@pytest.mark.parametrize("branches", [1, 2])
def test_a_loss_that_is_added_in_place_to_a_plain_one_is_a_part_of_it(branches: int) -> None:
    y, x = torch.tensor([0, 1]), torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    loss = x.square().mean()
    loss += 50 * F.cross_entropy(x, mixed_target([y] * branches, LossPlan()))
    plain = x.square().mean() + 50 * F.cross_entropy(x, y)
    torch.testing.assert_close(returned_loss(loss), plain)
    torch.testing.assert_close(torch.autograd.grad(returned_loss(loss), x), torch.autograd.grad(plain, x))
