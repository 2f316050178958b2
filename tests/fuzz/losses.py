"""Losses of logits and targets, in every form: functions, modules, by hand, and what no trick can see through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.layers import CLASSES

Loss = Callable[[Any, Tensor, Tensor], Any]  # of the module, the logits and the targets


class Squares(torch.autograd.Function):
    """A loss with a backward pass of its own."""

    @staticmethod
    def forward(context: Any, logits: Tensor, y: Tensor) -> Tensor:
        context.save_for_backward(logits - F.one_hot(y, CLASSES))
        return (logits - F.one_hot(y, CLASSES)).square().mean()

    @staticmethod
    def backward(context: Any, slope: Tensor) -> Any:
        (off,) = context.saved_tensors
        return 2 * slope * off / off.numel(), None


def _ctc(module: Any, logits: Tensor, y: Tensor) -> Tensor:
    steps = logits.log_softmax(-1).expand(4, *logits.shape)
    ones = torch.ones(len(y), dtype=torch.long)
    return F.ctc_loss(steps, (y % 2 + 1)[:, None], 4 * ones, ones)


def _focal(module: Any, logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def _added(module: Any, logits: Tensor, y: Tensor) -> Tensor:
    loss = 0.1 * logits.square().mean()
    loss += F.cross_entropy(logits, y)
    return loss


def _some(module: Any, logits: Tensor, y: Tensor) -> Tensor | None:
    return None if not module.spec.manual and module.trainer.fit_loop.batch_idx == 1 else F.cross_entropy(logits, y)


LOSSES: dict[str, Loss] = {
    "cross entropy": lambda module, logits, y: F.cross_entropy(logits, y),
    "module": lambda module, logits, y: nn.CrossEntropyLoss()(logits, y),
    "smoothed": lambda module, logits, y: F.cross_entropy(logits, y, label_smoothing=0.1),
    "weighted": lambda module, logits, y: F.cross_entropy(logits, y, weight=logits.new_tensor([1.0, 2.0, 3.0])),
    "ignored class": lambda module, logits, y: F.cross_entropy(logits, y, ignore_index=0, reduction="sum") / len(y),
    "dict": lambda module, logits, y: {"loss": F.cross_entropy(logits, y), "logits": logits.detach(), "y": y},
    "by hand": lambda module, logits, y: -logits.log_softmax(-1)[range(len(y)), y].mean(),
    "gathered": lambda module, logits, y: -logits.log_softmax(-1).gather(1, y[:, None]).mean(),
    "focal": _focal,
    "one-hot": lambda module, logits, y: F.cross_entropy(logits, F.one_hot(y, CLASSES).to(logits.dtype)),
    "binary": lambda module, logits, y: F.binary_cross_entropy_with_logits(logits[:, 0], (y == 0).to(logits.dtype)),
    "MSE": lambda module, logits, y: F.mse_loss(logits[:, 0], y.to(logits.dtype)),
    "several": lambda module, logits, y: F.cross_entropy(logits, y) + 0.1 * F.mse_loss(logits[:, 0], y.float()),
    "added in place": _added,
    "CTC": _ctc,
    "margin": lambda module, logits, y: F.multi_margin_loss(logits, y),
    "own Function": lambda module, logits, y: Squares.apply(logits, y),
    "library": lambda module, logits, y: torch.linalg.vector_norm(logits.sum(0) - F.one_hot(y, CLASSES).float().sum(0)),
    "NumPy": lambda module, logits, y: F.mse_loss(logits[:, 0], torch.from_numpy(y.numpy() * 0.5).to(logits.dtype)),
    "without targets": lambda module, logits, y: logits.square().mean(),
    "sometimes None": _some,
}
