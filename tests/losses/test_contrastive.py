"""Contrastive losses: of one process, of the ranks, and what other recipes make of their gradient."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lightning_tricks as lt
from tests.losses.towers import OneWay, Towers, on_ranks, pairs, shares, step
from tests.nets import build
from tests.ranks import Cases, run_cases
from tests.test_docs import DOCS


def naive(queries: Tensor, keys: Tensor, temperature: float) -> float:
    """The formula, by loops."""
    losses = []
    for i, q in enumerate(queries.tolist()):
        exps = [math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / temperature) for k in keys.tolist()]
        losses.append(-math.log(exps[i] / sum(exps)))
    return sum(losses) / len(losses)


def embeddings(size: int = 6) -> tuple[Tensor, Tensor]:
    x, y = pairs(size)
    return F.normalize(x, dim=-1), F.normalize(y[:, :6], dim=-1)


def test_it_is_the_formula() -> None:
    x, y = embeddings()
    assert float(lt.info_nce(x, y)) == pytest.approx(naive(x, y, 0.07), rel=1e-5)
    both = (naive(x, y, 0.5) + naive(y, x, 0.5)) / 2
    assert float(lt.clip_loss(x, y, temperature=torch.tensor([0.5]))) == pytest.approx(both, rel=1e-5)
    assert lt.info_nce(x, y) != lt.info_nce(y, x)  # one direction


def test_gradients_are_those_of_finite_differences() -> None:
    x, y = (each.double().requires_grad_() for each in embeddings(3))
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *a: lt.info_nce(*a[:2], temperature=a[2]), (x, y, temperature))
    torch.autograd.gradcheck(lambda *a: lt.clip_loss(*a[:2], temperature=a[2]), (x, y, temperature))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_similarities_are_not_rounded_to_16_bits(dtype: torch.dtype) -> None:
    x, y = (each.to(dtype) for each in embeddings(16))
    exact = lt.clip_loss(x.double(), y.double(), temperature=0.01)
    with torch.autocast("cpu", dtype=dtype):
        loss = lt.clip_loss(x, y, temperature=0.01)
        rounded = F.cross_entropy(x @ y.T / 0.01, torch.arange(16)) + F.cross_entropy(y @ x.T / 0.01, torch.arange(16))
    assert loss.dtype == torch.float32
    assert abs(float(loss - exact)) < 1e-4 < abs(float(rounded / 2 - exact))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keys": torch.ones(3, 2)}, ValueError, r"queries and keys must both be embeddings \(n, d\).*\(4, 2\) and"),
        ({"keys": torch.ones(4, 3)}, ValueError, r"got \(4, 2\) and \(4, 3\)"),
        ({"queries": torch.ones(4), "keys": torch.ones(4)}, ValueError, r"got \(4,\) and \(4,\)"),
        ({"keys": [[1.0]]}, TypeError, "keys must be Tensor"),
        ({"keys": torch.ones(4, 2).long()}, TypeError, "keys must be floating-point embeddings, got torch.int64"),
        ({"temperature": 0.0}, ValueError, "temperature must be above 0, .* got 0.0"),
        ({"temperature": -1.0}, ValueError, "temperature must be in"),
        ({"temperature": "0.1"}, TypeError, "temperature must be a number"),
        ({"temperature": torch.ones(2)}, ValueError, "a tensor with one entry"),
        ({"gather": 2}, TypeError, "gather must be bool or ProcessGroup, got 2"),
        ({"queries": torch.ones(0, 2), "keys": torch.ones(0, 2)}, ValueError, "at least one sample"),
    ],
)
def test_wrong_arguments_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.info_nce(**{"queries": torch.ones(4, 2), "keys": torch.ones(4, 2), **arguments})
    with pytest.raises(error, match=message.replace("queries", "images").replace("keys", "texts")):
        names = {"queries": "images", "keys": "texts"}
        given = {names.get(name, name): value for name, value in arguments.items()}
        lt.clip_loss(**{"images": torch.ones(4, 2), "texts": torch.ones(4, 2), **given})


# -- several ranks ----------------------------------------------------------------------------------------------------


class NotGathered(Towers):
    """Each rank compares its own samples."""

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        return lt.clip_loss(a, b, temperature=(-self.log_scale).exp(), gather=False)


class Constant(Towers):
    """The wrong recipes that stand in docs/contrastive.md: embeddings gathered without gradients."""

    def gathered(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach())
        return torch.cat(self.changed(parts, x))

    def changed(self, parts: list[Tensor], x: Tensor) -> list[Tensor]:
        return parts

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        temperature = (-self.log_scale).exp()
        return lt.clip_loss(self.gathered(a), self.gathered(b), temperature=temperature, gather=False)


class PutBack(Constant):
    """The rank's own slice with gradients."""

    def changed(self, parts: list[Tensor], x: Tensor) -> list[Tensor]:
        parts[dist.get_rank()] = x
        return parts


class Multiplied(Towers):
    """The right gradient times the number of ranks."""

    def gathered(self, x: Tensor) -> Tensor:
        return self.all_gather(x, sync_grads=True).flatten(0, 1)

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        loss = lt.clip_loss(self.gathered(a), self.gathered(b), temperature=(-self.log_scale).exp(), gather=False)
        return loss * dist.get_world_size()


KINDS = {kind.__name__: kind for kind in (Towers, OneWay, NotGathered, Constant, PutBack, Multiplied)}
CASES = [("Towers", "even"), ("Towers", "uneven"), ("OneWay", "uneven")]
WRONG = [("Constant", "even"), ("PutBack", "even"), ("Multiplied", "even"), ("NotGathered", "even")]


def fitted(case: tuple[str, str]) -> Any:
    kind, sizes = case
    if kind == "group":
        return in_a_group()
    if kind == "shapes":
        return saved_shapes()
    unused = {"strategy": "ddp_find_unused_parameters_true"} if kind == "Constant" else {}
    return on_ranks(KINDS[kind], sizes, **unused)


def in_a_group() -> list[float]:
    """The loss of ranks that form groups of two, each with its own samples; of no Trainer."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    (own,) = shares([embeddings(12)], "even")
    return [float(lt.info_nce(*own, gather=group)) for group in groups if dist.get_rank(group) >= 0]


def saved_shapes() -> tuple[int, set[tuple[int, ...]]]:
    """The rows of this rank, and the shapes of the tensors that wait for the backward pass."""
    (own,) = shares([embeddings(12)], "even")
    shapes: set[tuple[int, ...]] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.add(tuple(x.shape)) or x, lambda x: x):
        lt.clip_loss(own[0].requires_grad_(), own[1])
    return len(own[0]), shapes


@pytest.fixture(scope="module")
def two() -> Cases:
    return run_cases(fitted, [*CASES, *WRONG, ("group", "even"), ("shapes", "even")])


@pytest.fixture(scope="module")
def four() -> Cases:
    return run_cases(fitted, [*CASES, *WRONG, ("group", "even"), ("shapes", "even")], nprocs=4)


RANKS = ["two", pytest.param("four", marks=pytest.mark.slow)]


def alone(kind: str) -> tuple[dict[str, Tensor], float]:
    kept = step(build(KINDS[kind]), [pairs()])
    return kept.gradients[0], kept.losses[0]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_gradient_and_the_loss_of_one_process(
    case: tuple[str, str], ranks: str, request: pytest.FixtureRequest
) -> None:
    expected, loss = alone(case[0])
    for (gradients,), (value,) in request.getfixturevalue(ranks)[case]:
        assert value == pytest.approx(loss, abs=1e-6)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(torch.from_numpy(gradient), expected[name], atol=1e-6, rtol=1e-6)


def flat(gradients: dict[str, Any]) -> Tensor:
    """The gradient of the towers, which a frozen one lacks."""
    return torch.cat([torch.as_tensor(gradients[name]).flatten() for name in sorted(gradients) if name != "log_scale"])


def compared(found: dict[str, Any], expected: dict[str, Tensor]) -> tuple[float, float]:
    """The ratio of norms, and the cosine."""
    one, other = flat(found) if len(found) > 1 else torch.zeros(1), flat(expected)
    ratio = float(one.norm() / other.norm())
    return ratio, float(F.cosine_similarity(one, other, dim=0)) if ratio else 0.0


@pytest.mark.parametrize("ranks", RANKS)
def test_what_the_wrong_recipes_do_to_the_gradient(ranks: str, request: pytest.FixtureRequest) -> None:
    cases, world = request.getfixturevalue(ranks), {"two": 2, "four": 4}[ranks]
    expected, _ = alone("Towers")
    found = {kind: compared(cases[kind, sizes][0][0][0], expected) for kind, sizes in WRONG}
    assert found["Constant"] == (0.0, 0.0)
    assert found["PutBack"] == pytest.approx((1 / world, 1.0), abs=1e-5)
    assert found["Multiplied"] == pytest.approx((world, 1.0), abs=1e-5)
    page = (DOCS / "contrastive.md").read_text()
    (told,) = re.findall(r"^\| the loss of the rank's own samples, .*? \| (.*) \|$", page, re.MULTILINE)
    norms_and_cosines = [float(cell) for cell in told.split(" | ")]
    assert found["NotGathered"] == pytest.approx(norms_and_cosines[world // 4 :: 2], abs=0.01)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_group_has_the_loss_of_its_own_samples(ranks: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(ranks)["group", "even"]
    rows, (x, y) = 12 // len(found) * 2, embeddings(12)
    for rank, (loss,) in enumerate(found):
        mine = slice(rank // 2 * rows, rank // 2 * rows + rows)
        assert loss == pytest.approx(naive(x[mine], y[mine], 0.07), rel=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
def test_no_rank_holds_the_square(ranks: str, request: pytest.FixtureRequest) -> None:
    for rows, shapes in request.getfixturevalue(ranks)["shapes", "even"]:
        assert (rows, 12) in shapes
        assert (12, 12) not in shapes
