"""What is known of functions by their names, and losses for which it does not suffice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.operations import (
    Kind,
    cuts_behind_samples,
    is_loss,
    keeps_samples,
    kind_of,
    moves,
    named,
    reduces_samples,
)
from lightning_tricks.core.mixed_targets.target import mixed_target
from tests.core.mixed_targets.test_target import (
    CE,
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
    onehot_loss,
    outputs,
    plain,
    token_loss,
    token_mean,
    wanted,
)  # fmt: skip

X = torch.arange(1, 5)


@pytest.mark.parametrize(
    "change", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", *("xor", "lshift", "rshift")]
)
def test_functions_that_write(change):
    """Every augmented assignment is seen to write, under the name that it gets to ``__torch_function__`` by."""
    name, names = f"__i{change}__", []

    class Spy(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(kind_of(func, args) is Kind.WRITE)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.arange(1.0, 5) if change == "truediv" else torch.arange(1, 5)
    getattr(x.as_subclass(Spy), name)(1)
    assert names[0]


@pytest.mark.parametrize(
    "func", [Tensor.add_, Tensor.__setitem__, Tensor.scatter_, Tensor.data.__set__, F.relu_, Tensor.zero_]
)
def test_more_functions_that_write(func):
    assert kind_of(func, ()) is Kind.WRITE


@pytest.mark.parametrize("func", [Tensor.__add__, torch.add, torch.where, Tensor.scatter, Tensor.__len__])
def test_functions_that_only_read(func):
    assert kind_of(func, ()) is Kind.OTHER


def test_form_only():
    assert kind_of(torch.zeros_like, (X,)) is Kind.FORM
    assert kind_of(Tensor.new_zeros, (X, 3)) is Kind.FORM
    assert kind_of(Tensor.view_as, (X, X)) is Kind.FORM
    assert kind_of(torch.clone, (X,)) is Kind.OTHER


def test_moves():
    assert all(
        moves(func) for func in (torch.reshape, Tensor.view, Tensor.__getitem__, torch.permute, Tensor.T.__get__)
    )
    assert not any(moves(func) for func in (torch.add, torch.sum, torch.gather, torch.sort, torch.roll, torch.cat))


def test_what_concerns_the_graph_is_told_from_what_reads_values():
    graph = (Tensor.backward, torch.autograd.grad, Tensor.register_hook)
    assert {kind_of(func, ()) for func in graph} == {Kind.GRAPH}
    assert Kind.GRAPH not in {kind_of(func, ()) for func in (Tensor.detach, torch.add, Tensor.requires_grad_)}


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (torch.add, (), {}, True), (Tensor.__radd__, (), {}, True), (F.one_hot, (), {}, True),
        (torch.sigmoid, (), {}, True), (Tensor.float, (), {}, True),
        (F.logsigmoid, (), {}, True),
        (torch.sum, (1,), {}, True), (torch.sum, (), {"axis": -1}, True), (torch.softmax, (1,), {}, True),
        (Tensor.gather, (1,), {}, True), (torch.cumsum, (0,), {}, False), (torch.sum, (), {}, False),
        (torch.softmax, (-2,), {}, False), (torch.amax, ((0, 1),), {}, False), (Tensor.gather, (), {"dim": 0}, False),
        (torch.sort, (1,), {}, False), (torch.roll, (1,), {}, False), (torch.flipud, (), {}, False),
        (torch.bincount, (), {}, False), (torch.matmul, (), {}, False), (torch.cdist, (), {}, False),
        (torch.cat, (), {}, False), (Tensor.norm, (), {}, False), (torch.unique, (), {}, False),
    ],
)  # fmt: skip
def test_what_keeps_samples(func, args, kwargs, expected):
    assert keeps_samples(func, (torch.zeros(3, 2), *args), kwargs) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, True), ((0,), {}, True), ((1,), {}, False), ((-1,), {}, False), ((-2,), {}, True),
        (((0, 1),), {}, True),
        (((1,),), {}, False), ((), {"dim": 1}, False), ((), {"dim": 0}, True), ((), {"dim": None}, True),
        ((), {"dtype": torch.float64}, True), ((), {"dim": (), "keepdim": True}, True),
        ((), {"axis": 1}, False), ((), {"axis": 0}, True),
    ],
)  # fmt: skip
def test_reductions_of_samples(args, kwargs, expected):
    for func in (torch.sum, Tensor.mean):
        assert reduces_samples(func, (torch.zeros(3, 2), *args), kwargs) == expected
    assert not reduces_samples(torch.amax, (torch.zeros(3, 2), *args), kwargs)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((..., slice(1, None)), True), ((slice(None), 0), True), ((slice(None), slice(None, -1), 2), True),
        ((slice(1, None), 0), False), ((0, slice(None)), False), (slice(None), False), ((..., 0, 0, 0), False),
        ((slice(None), None), False), ((slice(None), torch.tensor([0, 1])), False), ((torch.tensor([0]), 1), False),
    ],
)  # fmt: skip
def test_cuts_behind_samples_leave_the_first_dimension_alone(key, expected):
    x = torch.arange(3)[:, None, None].expand(3, 4, 5)
    assert cuts_behind_samples(Tensor.__getitem__, (x, key)) == expected
    if expected:
        assert (x[key].flatten(1) if x[key].ndim > 1 else x[key][:, None]).unique(dim=1).tolist() == [[0], [1], [2]]


class Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        ctx.save_for_backward(z, y)
        return CE(z, y, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        z, y = ctx.saved_tensors
        onehot = F.one_hot(y, z.shape[1])
        return gradient.view(-1, 1) * (z.softmax(1) - onehot) / (len(z) if not gradient.ndim else 1), None, None


ROI = torch.tensor([1, 0, 1, 1, 0, 0]).bool()


def iou(z: Tensor, y: Tensor) -> Tensor:
    p, onehot = z.softmax(1), F.one_hot(y, C)
    return 1 - (p * onehot).sum() / (p + onehot - p * onehot).sum()


def beside(loss: Loss) -> Loss:
    """A loss that is not lost alone: with the one beside it the batch does not end in an error."""
    return lambda z, y: CE(z, y) + loss(z, y)


def by_views(z: Tensor, y: Tensor) -> Tensor:
    onehot = torch.zeros(B, C)
    for sample in range(B):
        onehot[sample][y[sample]] = 1
    return onehot_loss(onehot, z)


def into(part: Callable[[Tensor], Tensor]) -> Loss:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        onehot = torch.zeros(B, C)
        part(onehot).scatter_(1, y[:, None], 1)
        return onehot_loss(onehot, z)

    return loss


def hooked(z: Tensor, y: Tensor) -> Tensor:
    loss = CE(z, y)
    loss.register_hook(lambda gradient: 3 * gradient)
    return loss / 2


def mean_focal(z: Tensor, y: Tensor) -> Tensor:
    loss = CE(z, y)
    return (1 - torch.exp(-loss)) ** 2 * loss


def accumulated(z: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(())
    total += CE(z, y)
    return total


def toggled(z: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(B, dtype=torch.bool)
    mask ^= y == 1
    return (z[:, 0] * mask).mean()


def written_rows(z: Tensor, y: Tensor) -> Tensor:
    margins = z.clone()
    margins[torch.arange(B), y] = margins[torch.arange(B), y] - 0.3
    return CE(10 * margins, y)


def squared_total(z: Tensor, y: Tensor) -> Tensor:
    return accumulated(z, y).square()


RIGHT = {
    "square of a total": Case(squared_total),
    "root": Case(lambda z, y: F.mse_loss(z, y).sqrt(), REAL),
    "focal of the mean": Case(mean_focal),
    "intersection over union": Case(iou),
    "product": Case(lambda z, y: CE(z, y) * CE(-z, y)),
    "product of a stack": Case(lambda z, y: torch.stack([CE(z, y), CE(-z, y)]).prod()),
    "the larger": Case(lambda z, y: max(CE(z, y), torch.maximum(CE(-z, y), CE(2 * z, y)))),
    "flooded": Case(lambda z, y: (CE(z, y) - 1.5).abs() + 1.5),
    "centred": Case(lambda z, y: (logp(z, y) - logp(z, y).mean()).square().mean()),
    "weights of entries": Case(lambda z, y: (logp(z, y) * logp(z, y).detach()).sum()),
    "hardest": Case(lambda z, y: CE(z, y, reduction="none").topk(3)[0].mean()),
    "median": Case(lambda z, y: CE(z, y, reduction="none").median()),
    "larger than the mean": Case(lambda z, y: (lambda loss: loss[loss > loss.mean()].mean())(logp(z, y))),
    "loop": Case(lambda z, y: sum((CE(a[None], b[None]) for a, b in zip(z, y, strict=True)), torch.tensor(0.0))),
    "rows of a class": Case(lambda z, y: sum(z[y == c].mean(0).square().sum() for c in y.unique())),
    "row of a number": Case(lambda z, y: CE(z, y) + z[:, y.max()].sum() + z[y[0]].sum()),
    "count": Case(lambda z, y: (plain(z, y) * ROI).sum() / ((y >= 0) & ROI).sum(), SOME),
    "accuracy": Case(lambda z, y: CE(z, y) * (z.argmax(1) != y).float().mean()),
    "one number in a vector": Case(lambda z, y: logp(z, y).mean(0, keepdim=True).sum()),
    "matrices": Case(lambda z, y: -(z.log_softmax(1) @ F.one_hot(y, C).float().T).trace()),
    "einsum": Case(lambda z, y: -torch.einsum("bc,bc->", z.log_softmax(1), F.one_hot(y, C).float())),
    "means of classes": Case(lambda z, y: torch.zeros(C, C).index_add_(0, y, z).square().sum()),
    "margin, written": Case(written_rows),
    "margin, scattered": Case(lambda z, y: CE(z.clone().scatter_add_(1, y[:, None], -torch.ones(B, 1)), y)),
    "gradient penalty": Case(lambda z, y: torch.autograd.grad(CE(z, y), z, create_graph=True)[0].square().sum()),
    "function of gradients": Case(lambda z, y: torch.func.grad(lambda z: CE(z, y))(z).square().sum()),
    "accumulated": Case(accumulated),
    "toggled": Case(toggled),
    "hook": Case(hooked),
    "recomputed": Case(lambda z, y: checkpoint(CE, z, y, use_reentrant=False)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_formula_is_mixed(name):
    assert_right(RIGHT[name])


ERRORS = {
    "rows": by_views,
    "view": into(lambda onehot: onehot.view(B, C)),
    "function": Log.apply,
    "function of each": lambda z, y: Log.apply(z, y, "none").mean(),
    "recomputed": lambda z, y: checkpoint(CE, z, y, use_reentrant=True),
    "out": lambda z, y: torch.mul(F.one_hot(y, C), z, out=torch.empty(B, C)).sum(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_mixed_is_an_error(name):
    with pytest.raises(MisconfigurationException, match="two labels"):
        got(Case(beside(ERRORS[name])))


LOST = "a limit of torch: it does not call __torch_function__ here, so these are the plain labels, beside a mixed loss"
ALIAS = "a limit of torch: what is written into x.data is told of the alias, not of x"
WRONG = {
    "full_like": (Case(beside(lambda z, y: F.mse_loss(z, torch.full_like(z, y[0])))), LOST),
    "data": (Case(beside(into(lambda onehot: onehot.data))), ALIAS),
    "as_tensor": (Case(beside(lambda z, y: CE(-z, torch.as_tensor(y, dtype=torch.int32).long()))), LOST),
    "vmap": (Case(beside(lambda z, y: torch.vmap(CE)(-z, y).mean())), LOST),
    "functional gradient": (Case(beside(lambda z, y: torch.func.grad(CE)(z, y).square().sum())), LOST),
    "new_tensor": (Case(beside(lambda z, y: CE(z, z.new_tensor(y).long()))), LOST),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name, marks=pytest.mark.xfail(reason=why, strict=True, raises=AssertionError))
        for name, (c, why) in WRONG.items()
    ],
)
def test_loss_is_mixed_or_an_error(case):
    assert_right(case, unknown=True)


def test_a_number_that_is_detached_is_that_of_the_step():
    def loss(z: Tensor, y: Tensor, number: Tensor | None = None) -> Tensor:
        return CE(z, y) / (CE(2 * z, y).detach() if number is None else number)

    mixed = LAM * CE(2 * outputs(), Y) + (1 - LAM) * CE(2 * outputs(), Y[INDEX])
    expected = wanted(Case(lambda z, y: loss(z, y, mixed.detach())))
    torch.testing.assert_close(got(Case(loss)), expected, atol=1e-6, rtol=1e-5)


SQUARE = (B, B)


def balanced(z: Tensor, y: Tensor) -> Tensor:
    return (1 / torch.bincount(y, minlength=z.shape[1]).clamp(min=1))[y] * CE(z, y, reduction="none")


def column_terms(z: Tensor, y: Tensor) -> Tensor:
    return CE(z.permute(1, 2, 0), y, reduction="none").mean(1)


def scattered(z: Tensor, y: Tensor) -> Tensor:
    return CE(z.flip(0), torch.zeros_like(y).scatter_(0, torch.arange(B).flip(0), y))


COLUMNS = torch.randint(0, C, SQUARE, generator=torch.Generator().manual_seed(3))
SAMPLES = {
    "mask": Case(lambda z, y: CE(z[y >= 0], y[y >= 0]), SOME, plain, norm=known),
    "masked losses": Case(lambda z, y: plain(z, y)[y >= 0].mean(), SOME, plain, norm=known),
    "sorted": Case(lambda z, y: CE(z[y.argsort()], y[y.argsort()]), terms=logp),
    "class counts": Case(lambda z, y: balanced(z, y).mean(), terms=balanced, shape=SQUARE),
    "classes first": Case(
        lambda z, y: -((torch.arange(B)[:, None] == y) * z.log_softmax(1).T).sum() / B, Y, logp, SQUARE
    ),
    "flipped": Case(lambda z, y: CE(z.flipud(), torch.flipud(y)), terms=logp),
    "gathered": Case(lambda z, y: CE(z.flip(0), y.gather(0, torch.arange(B).flip(0))), terms=logp),
    "scattered": Case(scattered, terms=logp),
    "columns": Case(
        lambda z, y: CE(z.flatten(0, 1), torch.stack([y[:, t] for t in range(B)]).flatten()),
        COLUMNS, column_terms, (B, B, C),
    ),
    "named argument": Case(
        lambda z, y: CE(z.flatten(0, 1), torch.transpose(input=y, dim0=0, dim1=1).flatten()),
        COLUMNS, column_terms, (B, B, C),
    ),
    "axis": Case(lambda z, y: (token_loss(z, y).sum(axis=1) / (y >= 0).sum(1)).mean(), TOKENS, token_mean, (B, T, C)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_mixed_or_an_error(name):
    assert_right(SAMPLES[name], LAMS, unknown=True)


def test_what_comes_behind_a_mean_over_samples_takes_the_mixed_one():
    own, other = (F.mse_loss(outputs(), y, reduction="none").mean(1) for y in (REAL, REAL[INDEX]))
    z, y = outputs(), mixed_target([REAL, REAL[INDEX]], LossPlan(LAMS))
    torch.testing.assert_close(F.mse_loss(z, y).sqrt(), (LAMS * own + (1 - LAMS) * other).mean().sqrt())


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a layer after a target runs once for each branch: it counts each batch twice",
)
def test_statistics_of_batchnorm():
    norm, plainly = nn.BatchNorm1d(C), nn.BatchNorm1d(C)
    CE(norm(outputs() + 0.0 * F.one_hot(mixed_target([Y, Y[INDEX]], LossPlan(LAM)), C)), Y)
    plainly(outputs())
    torch.testing.assert_close(norm.running_mean, plainly.running_mean)


def test_layers_without_a_name_are_not_kept_alive() -> None:
    """As ``torch.jit`` traces them; what is known of a function is remembered for those of torch alone."""

    class Traced:
        def __call__(self, x: Tensor) -> Tensor:
            return x

    layer = Traced()
    assert not is_loss(named(layer))
    kept = weakref.ref(layer)
    del layer
    gc.collect()
    assert kept() is None
