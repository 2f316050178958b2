"""Odd parameters, buffers and submodules of a module, and steps that differentiate inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.fuzz.layers import CLASSES

Extra = tuple[Callable[[Any], None], Callable[[Any, Tensor], Any]]  # what __init__ makes, and what it adds to the loss


def _set(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, make())


def _buffer(name: str, make: Callable[[], Any], persistent: bool = True) -> Callable[[Any], None]:
    return lambda module: module.register_buffer(name, make(), persistent=persistent)


def _weight(*shape: int, **settings: Any) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.ones(shape, **settings))


def _listed(module: Any) -> None:
    module.outside = [nn.Parameter(torch.ones(3)), torch.ones(3)]


def _teach(module: Any) -> None:
    module.teacher = nn.Linear(8, CLASSES).requires_grad_(False)


def _memo(module: Any, x: Tensor) -> Any:
    module.memo = module.memo + x.detach().float().mean()
    return 0.01 * module.memo.sum()


def _counts(module: Any, x: Tensor) -> Any:
    module.count += 1
    return 0.01 * module.count.float() / (1 + module.count)


def _late(module: Any, x: Tensor) -> Any:
    if module.late is None:
        module.late = torch.zeros(3)
    module.late = module.late + 1
    return 0.01 * module.late.sum()


def _metric(module: Any, x: Tensor) -> Any:
    module.mean.update(x.detach().float())
    return 0.01 * module.mean.compute()


def _shared(module: Any) -> None:
    module.first = nn.Linear(8, 8)
    module.second = module.first
    module.heads = nn.ModuleDict({"a": module.first})


def _tied(module: Any) -> None:
    module.one, module.two = nn.Linear(4, 4), nn.Linear(4, 4)
    module.two.weight = module.one.weight


def _flat(x: Tensor) -> Tensor:
    return x.float().flatten(1)


def _slope(module: Any, x: Tensor) -> Any:
    """The slope of the outputs by the inputs, with a graph."""
    x = x.detach().clone().requires_grad_()
    module.layers.eval()  # so that BatchNorm and dropout see each batch once
    (slope,) = torch.autograd.grad(module.layers(x).square().sum(), x, create_graph=True)
    module.layers.train()
    return slope


def _penalty_by_weights(module: Any, x: Tensor) -> Any:
    bias = module.layers[-1].bias
    if not bias.requires_grad:  # it is frozen, or another optimizer has its turn
        return 0
    (slope,) = torch.autograd.grad((bias.square() * (1 + bias)).sum(), bias, create_graph=True)
    return 0.01 * slope.square().mean()


def _adversarial(module: Any, x: Tensor) -> Any:
    x = x.detach().clone().requires_grad_()
    module.layers.eval()
    (slope,) = torch.autograd.grad(module.layers(x).square().sum(), x)
    z = module.layers(x.detach() + 0.1 * slope.sign())
    module.layers.train()
    return 0.1 * z.square().mean()


EXTRAS: dict[str, Extra] = {
    "tied": (_tied, lambda module, x: module.two(module.one(_flat(x)[:, :4])).square().mean()),
    "frozen": (_teach, lambda module, x: module.teacher(_flat(x)).square().mean()),
    "complex": (
        _set("wave", _weight(2, dtype=torch.cfloat)),
        lambda module, x: (module.wave * torch.view_as_complex(_flat(x)[:, :2].contiguous())[:, None]).abs().mean(),
    ),
    "scalar": (_set("scale", _weight()), lambda module, x: (module.scale * _flat(x)).square().mean()),
    "empty": (_set("empty", _weight(0)), lambda module, x: module.empty.sum()),
    "unused": (_set("unused", _weight(3)), lambda module, x: 0),
    "parameters in a list": (_listed, lambda module, x: 0.1 * (module.outside[0] * module.outside[1]).sum()),
    "ParameterList": (
        _set("several", lambda: nn.ParameterList([torch.ones(2), torch.ones(1)])),
        lambda module, x: 0.1 * sum((each * 2).sum() for each in module.several),
    ),
    "integer parameter": (
        _set("places", lambda: nn.Parameter(torch.arange(3), requires_grad=False)),
        lambda module, x: 0.01 * module.places.sum(),
    ),
    "sparse embedding": (
        _set("table", lambda: nn.Embedding(3, 2, sparse=True)),
        lambda module, x: module.table(torch.tensor([0, 1])).square().mean(),
    ),
    "embedding with max_norm": (
        _set("words", lambda: nn.Embedding(3, 2, max_norm=0.5)),
        lambda module, x: module.words(torch.tensor([0, 1])).sum(),
    ),
    "replaced buffer": (_buffer("memo", lambda: torch.zeros(2)), _memo),
    "buffer not saved": (_buffer("count", lambda: torch.tensor(0), persistent=False), _counts),
    "buffer made late": (_buffer("late", lambda: None), _late),
    "metric in the loss": (_set("mean", MeanMetric), _metric),
    "forces": (lambda module: None, lambda module, x: 0.1 * (_slope(module, x) - 0.1).square().mean()),
    "gradient penalty": (lambda module: None, lambda module, x: 0.1 * (_slope(module, x).norm() - 1) ** 2),
    "residual": (lambda module: None, lambda module, x: 0.01 * (_slope(module, x) + x).square().mean()),
    "adversary": (lambda module: None, _adversarial),
    "slope by weights": (lambda module: None, _penalty_by_weights),
    "shared submodule": (_shared, lambda module, x: module.heads["a"](module.second(_flat(x))).square().mean()),
}

DIFFERENTIATES = ("forces", "gradient penalty", "residual", "adversary", "slope by weights")
