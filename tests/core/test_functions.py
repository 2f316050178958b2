"""What is known of functions by their names, and losses for which it does not suffice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tricks.core.functions import moves, reduces_samples, reorders, uses_form_only, writes
from lightning_tricks.core.plan import Plan
from lightning_tricks.core.targets import knowing
from tests.core.test_targets import (
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
    Log,
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
)  # fmt: skip

X = torch.arange(1, 5)
BITS = {"__ixor__", "__ilshift__", "__irshift__"}


@pytest.mark.parametrize(
    "change", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", *("xor", "lshift", "rshift")]
)
def test_functions_that_write(change):
    """Every augmented assignment is seen to write, under the name that it gets to ``__torch_function__`` by."""
    name, names = f"__i{change}__", []

    class Spy(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(writes(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.arange(1.0, 5) if change == "truediv" else torch.arange(1, 5)
    if name in BITS:
        pytest.xfail("not in _ASSIGN")
    getattr(x.as_subclass(Spy), name)(1)
    assert names[0]


@pytest.mark.parametrize(
    "func", [Tensor.add_, Tensor.__setitem__, Tensor.scatter_, Tensor.data.__set__, F.relu_, Tensor.zero_]
)
def test_more_functions_that_write(func):
    assert writes(func)


@pytest.mark.parametrize("func", [Tensor.__add__, torch.add, torch.where, Tensor.scatter, Tensor.__len__])
def test_functions_that_only_read(func):
    assert not writes(func)


def test_form_only():
    assert uses_form_only(torch.zeros_like, (X,))
    assert uses_form_only(Tensor.new_zeros, (X, 3))
    assert uses_form_only(Tensor.view_as, (X, X))
    assert not uses_form_only(torch.clone, (X,))


def test_moves_and_reorders():
    assert all(
        moves(func) for func in (torch.reshape, Tensor.view, Tensor.__getitem__, torch.permute, Tensor.T.__get__)
    )
    assert all(reorders(func) for func in (torch.sort, Tensor.topk, torch.roll, torch.chunk))
    assert not any(moves(func) or reorders(func) for func in (torch.add, torch.sum, torch.gather))


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, True), ((0,), {}, True), ((1,), {}, False), ((-1,), {}, False), ((-2,), {}, True),
        (((0, 1),), {}, True),
        (((1,),), {}, False), ((), {"dim": 1}, False), ((), {"dim": 0}, True), ((), {"dim": None}, True),
        ((), {"dtype": torch.float64}, True), ((), {"dim": (), "keepdim": True}, True),
        pytest.param((), {"axis": 1}, False, marks=pytest.mark.xfail(reason="NumPy's name of dim", strict=True)),
    ],
)  # fmt: skip
def test_reductions_of_samples(args, kwargs, expected):
    for func in (torch.sum, Tensor.mean):
        assert reduces_samples(func, (torch.zeros(3, 2), *args), kwargs) == expected
    assert not reduces_samples(torch.amax, (torch.zeros(3, 2), *args), kwargs)


def marked(wrong: dict[str, tuple[Case, str]]) -> list:
    return [
        pytest.param(case, id=name, marks=pytest.mark.xfail(reason=why, strict=True))
        for name, (case, why) in wrong.items()
    ]


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


def mean_focal(z: Tensor, y: Tensor) -> Tensor:
    loss = CE(z, y)
    return (1 - torch.exp(-loss)) ** 2 * loss


LATER = "what comes behind the number is done once, for the mixed one"
LABELS = "a single number that is no loss is that of the first labels"
VIEWS = "only the view becomes a target, not what it is a view of"
LOST = "not seen: another loss was computed"
WRONG = {
    "root": (Case(lambda z, y: F.mse_loss(z, y).sqrt(), REAL), LATER),
    "focal of the mean": (Case(mean_focal), LATER),
    "intersection over union": (Case(iou), LATER),
    "product": (Case(lambda z, y: CE(z, y) * CE(-z, y)), LATER),
    "loss by its value": (Case(lambda z, y: CE(z, y) / CE(z, y).detach() + CE(-z, y)), LATER),
    "centred": (Case(lambda z, y: (logp(z, y) - logp(z, y).mean()).square().mean()), LATER),
    "weights by losses": (Case(lambda z, y: (logp(z, y) ** 2 / logp(z, y).sum().detach()).sum()), LATER),
    "loop": (
        Case(beside(lambda z, y: sum((CE(a[None], b[None]) for a, b in zip(z, y, strict=True)), torch.tensor(0.0)))),
        LABELS,
    ),
    "count": (Case(lambda z, y: (plain(z, y) * ROI).sum() / ((y >= 0) & ROI).sum(), SOME), LABELS),
    "accuracy": (Case(lambda z, y: CE(z, y) * (z.argmax(1) != y).float().mean()), LABELS),
    "full_like": (Case(beside(lambda z, y: F.mse_loss(z, torch.full_like(z, y[0])))), LABELS),
    "one number in a vector": (Case(beside(lambda z, y: logp(z, y).mean(0, keepdim=True))), "not of dimension 0"),
    "rows": (Case(beside(by_views)), VIEWS),
    "view": (Case(beside(into(lambda onehot: onehot.view(B, C)))), VIEWS),
    "data": (Case(beside(into(lambda onehot: onehot.data))), VIEWS),
    "as_tensor": (Case(beside(lambda z, y: CE(-z, torch.as_tensor(y, dtype=torch.int32).long()))), LOST),
    "vmap": (Case(beside(lambda z, y: torch.vmap(CE)(-z, y).mean())), LOST),
    "function of each": (Case(beside(lambda z, y: Log.apply(-z, y, "none").mean())), "its gradient is lost"),
    "function": (Case(beside(lambda z, y: Log.apply(-z, y))), LOST),
}


@pytest.mark.parametrize("case", marked(WRONG))
def test_loss_is_mixed_or_an_error(case):
    assert_right(case, unknown=True)


OTHER = "samples of the second branch are where those of the first are"
LENGTH = "that a length is B does not say that these are the samples"
SQUARE = (B, B)


def balanced(z: Tensor, y: Tensor) -> Tensor:
    return (1 / torch.bincount(y, minlength=z.shape[1]).clamp(min=1))[y] * CE(z, y, reduction="none")


def column_terms(z: Tensor, y: Tensor) -> Tensor:
    return CE(z.permute(1, 2, 0), y, reduction="none").mean(1)


def scattered(z: Tensor, y: Tensor) -> Tensor:
    return CE(z.flip(0), torch.zeros_like(y).scatter_(0, torch.arange(B).flip(0), y))


def toggled(z: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(B, dtype=torch.bool)
    mask ^= y == 1
    return (z[:, 0] * mask).mean()


def root(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, y).sqrt()


COLUMNS = torch.randint(0, C, SQUARE, generator=torch.Generator().manual_seed(3))
WRONG_SAMPLES = {
    "mask": (Case(lambda z, y: CE(z[y >= 0], y[y >= 0]), SOME, plain, norm=known), OTHER),
    "masked losses": (Case(lambda z, y: plain(z, y)[y >= 0].mean(), SOME, plain, norm=known), OTHER),
    "sorted": (Case(lambda z, y: CE(z[y.argsort()], y[y.argsort()]), terms=logp), OTHER),
    "class counts": (Case(lambda z, y: balanced(z, y).mean(), terms=balanced, shape=SQUARE), LENGTH),
    "classes first": (
        Case(lambda z, y: -((torch.arange(B)[:, None] == y) * z.log_softmax(1).T).sum() / B, Y, logp, SQUARE), LENGTH
    ),
    "flipped": (Case(lambda z, y: CE(z.flipud(), torch.flipud(y)), terms=logp), LENGTH),
    "gathered": (Case(lambda z, y: CE(z.flip(0), y.gather(0, torch.arange(B).flip(0))), terms=logp), LENGTH),
    "scattered": (Case(scattered, terms=logp), LENGTH),
    "columns": (
        Case(
            lambda z, y: CE(z.flatten(0, 1), torch.stack([y[:, t] for t in range(B)]).flatten()),
            COLUMNS, column_terms, (B, B, C),
        ),
        LENGTH,
    ),
    "named argument": (
        Case(
            lambda z, y: CE(z.flatten(0, 1), torch.transpose(input=y, dim0=0, dim1=1).flatten()),
            COLUMNS, column_terms, (B, B, C),
        ),
        "only args[0] is looked at",
    ),
    "axis": (
        Case(lambda z, y: (token_loss(z, y).sum(axis=1) / (y >= 0).sum(1)).mean(), TOKENS, token_mean, (B, T, C)),
        "NumPy's name of dim is taken for all dimensions, and weights count twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", marked(WRONG_SAMPLES))
def test_samples_are_mixed_or_an_error(case):
    assert_right(case, LAMS, unknown=True)


@pytest.mark.xfail(reason="^= is not among the functions that write", strict=True)
def test_toggled():
    assert_right(Case(toggled))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.xfail(reason="new_tensor takes more than the form", strict=True)
def test_new_tensor():
    assert_right(Case(beside(lambda z, y: CE(z, z.new_tensor(y).long()))), unknown=True)


@pytest.mark.xfail(reason=LATER, strict=True)
def test_root_of_a_mean_over_samples_is_an_error():
    with pytest.raises(RuntimeError):
        got(Case(root, REAL), LAMS)


@pytest.mark.xfail(reason="done for each branch, so the statistics are updated twice", strict=True)
def test_statistics_of_batchnorm():
    norm, plainly = nn.BatchNorm1d(C), nn.BatchNorm1d(C)
    CE(norm(outputs() + 0.0 * F.one_hot(knowing([Y, Y[INDEX]], Plan(LAM)), C)), Y)
    plainly(outputs())
    torch.testing.assert_close(norm.running_mean, plainly.running_mean)
