"""What the pictures of the cards share: their colours, the digits, a small network and its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLAIN, OURS, GREY, WARM = "#9ca3af", "#7c3aed", "#d1d5db", "#ea580c"


def digits() -> tuple[Tensor, Tensor]:
    """The images (N, 64) of scikit-learn in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)


def network() -> nn.Sequential:
    """A small network for the digits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def bare(*axes: Any) -> None:
    """Leave out the frame above and at the right."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


def train(net: nn.Sequential, y: Tensor | None = None, epochs: int = 4) -> list[Tensor]:
    """Train on the digits; the norms of the gradients."""
    x, labels = digits()
    optimizer, norms = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=order).split(32):
            optimizer.zero_grad()
            F.cross_entropy(net(x[index]), (labels if y is None else y)[index]).backward()
            norms.append(torch.nn.utils.get_total_norm([weight.grad for weight in net.parameters()]))
            optimizer.step()
    return norms
