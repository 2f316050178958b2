"""Muon in plain torch, as its authors describe it: momentum, five Newton-Schulz steps, the size of AdamW's steps."""

from __future__ import annotations

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (  # of the five steps, by Jiacheng You
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalized(update: Tensor) -> Tensor:
    """The nearest orthogonal matrix, about: singular values near 1, and the same singular vectors; in bfloat16."""
    wide = update.flatten(1) if len(update) <= update[0].numel() else update.flatten(1).T
    found = wide.bfloat16() / wide.bfloat16().norm()
    for a, b, c in COEFFICIENTS:
        square = found @ found.T
        found = a * found + (b * square + c * square @ square) @ found
    return (found if len(update) <= update[0].numel() else found.T).reshape(update.shape)


class NaiveMuon:
    """Of one weight; steps have a root mean square of about 0.2 ``lr``, as those of AdamW."""

    def __init__(self, weight: Tensor, weight_decay: float, nesterov: bool = True) -> None:
        self.weight, self.weight_decay, self.nesterov = weight, weight_decay, nesterov
        self.average = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float) -> None:
        """Decoupled weight decay, then the step."""
        self.average = MOMENTUM * self.average + (1 - MOMENTUM) * gradient
        ahead = MOMENTUM * self.average + (1 - MOMENTUM) * gradient if self.nesterov else self.average
        scale = 0.2 * max(len(self.weight), self.weight[0].numel()) ** 0.5
        self.weight.copy_((1 - lr * self.weight_decay) * self.weight - lr * scale * orthogonalized(ahead))
