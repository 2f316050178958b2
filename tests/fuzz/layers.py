"""The networks of random modules: layers that draw, count, are made late, parametrized, recurrent or in TorchScript."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.callbacks.test_moe_balance import Experts
from tests.conformance.trick import Words

CLASSES = 3
EXAMPLE = torch.zeros(4, 8)  # to trace with


class Recurrent(nn.Module):
    """Takes the features for a sequence of any length, and gives its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 6, batch_first=True)
        self.own = list(self.cell.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unflatten(1, (-1, 2)))[0][:, -1]


class Cached(nn.Module):
    """Stores its last input, and numbers of its own, as attributes."""

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.calls = x, getattr(self, "calls", 0) + 1
        return x * (1 + 0.01 * self.calls)


class Noise(nn.Module):
    """Draws from three generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * torch.rand_like(x))


class Counting(nn.Module):
    """Changes its attributes and a buffer, on which its outputs depend; for TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.carried = nn.Linear(8, 6), 0, torch.zeros(6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.carried = self.carried + 0.1
        self.seen.mul_(0.9).add_(0.1)
        return self.linear(x) * (1.0 + 0.01 * self.calls) + self.carried + self.seen


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))


def _called(layer: nn.Module) -> nn.Module:
    """A layer that has run once, as tracing does."""
    layer(EXAMPLE)
    return layer


def _mlp(*middle: nn.Module, first: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(first or nn.Linear(8, 6), *middle, nn.Tanh(), nn.Linear(6, CLASSES))


def _convolved() -> list[nn.Module]:
    """Layers for images of any size; the convolution is without a bias, whose gradient would be rounding alone."""
    first = [nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU()]
    return [*first, nn.AdaptiveAvgPool2d((2, 4)), nn.Flatten()]


NETS: dict[str, Callable[[], nn.Sequential]] = {
    "linear": _mlp,
    "BatchNorm and dropout": lambda: _mlp(nn.BatchNorm1d(6), nn.Dropout(0.2)),
    "noise": lambda: _mlp(Noise()),
    "cached": lambda: _mlp(Cached()),
    "recurrent": lambda: _mlp(first=Recurrent()),
    "spectral norm": lambda: _mlp(first=parametrizations.spectral_norm(nn.Linear(8, 6))),
    "weight norm": lambda: _mlp(first=parametrizations.weight_norm(nn.Linear(8, 6))),
    "lazy": lambda: _mlp(nn.Dropout(0.2), first=nn.LazyLinear(6)),
    "double": lambda: _mlp().double(),
    "convolution": lambda: nn.Sequential(*_convolved(), nn.Linear(24, CLASSES)),
    "experts": lambda: nn.Sequential(
        *_convolved(), nn.Linear(24, 16), Experts(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, CLASSES)
    ),
    "tokens": lambda: _mlp(Words()),
    "scripted": lambda: _mlp(first=torch.jit.script(nn.Linear(8, 6))),
    "scripted with BatchNorm": lambda: _mlp(first=torch.jit.script(_normed())),
    "traced": lambda: _mlp(first=torch.jit.trace(nn.Sequential(nn.Linear(8, 6), nn.Tanh()), EXAMPLE)),
    "traced with BatchNorm": lambda: _mlp(first=torch.jit.trace(_normed(), EXAMPLE, check_trace=False)),
    "scripted with attributes": lambda: _mlp(first=torch.jit.script(Counting())),
}
ASKED_FOR = ("tokens",)  # by tricks alone
IN_PYTHON: dict[str, Callable[[], nn.Sequential]] = {  # the same networks without TorchScript
    "scripted": lambda: _mlp(first=nn.Linear(8, 6)),
    "scripted with BatchNorm": lambda: _mlp(first=_normed()),
    "traced": lambda: _mlp(first=nn.Sequential(nn.Linear(8, 6), nn.Tanh())),
    "traced with BatchNorm": lambda: _mlp(first=_called(_normed())),
    "scripted with attributes": lambda: _mlp(first=Counting()),
}
OF_IMAGES = ("convolution", "experts")
OF_SEQUENCES = ("linear", "weight norm", "spectral norm", "noise", "cached", "double", "scripted")  # of any shape
BY_SAMPLE = ("linear", "recurrent", "weight norm", "double", "scripted", "traced")  # a sample's outputs are its own
