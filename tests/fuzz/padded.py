"""Sequences of different lengths in one batch, with padding behind them, and means over what is no padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import rnn

CLASSES, LENGTH = 3, 6
IGNORED = -100

# How a batch holds inputs (B, T, F), labels (B, T) and lengths (B,), and how it is read: with a mask (B, T).
Holds = tuple[Callable[[Tensor, Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor, Tensor]]]


def mask_of(lengths: Tensor) -> Tensor:
    """Where sequences are (B, T)."""
    return torch.arange(LENGTH) < lengths[:, None]


STRUCTURES: dict[str, Holds] = {
    "mask": (
        lambda x, y, lengths: {"x": x, "mask": mask_of(lengths), "y": y},
        lambda b: (b["x"], b["y"], b["mask"]),
    ),
    "mask of integers": (
        lambda x, y, lengths: {"x": x, "attention_mask": mask_of(lengths).long(), "labels": y},
        lambda b: (b["x"], b["labels"], b["attention_mask"] > 0),
    ),
    "mask of numbers": (
        lambda x, y, lengths: {"x": x, "attention_mask": mask_of(lengths).float(), "labels": y},
        lambda b: (b["x"], b["labels"], b["attention_mask"] > 0),
    ),
    "lengths": (
        lambda x, y, lengths: {"x": x, "lengths": lengths, "y": y},
        lambda b: (b["x"], b["y"], mask_of(b["lengths"])),
    ),
    "lengths in a tuple": (lambda x, y, lengths: (x, y, lengths), lambda b: (b[0], b[1], mask_of(b[2]))),
    "ignored labels": (
        lambda x, y, lengths: (x, y.masked_fill(~mask_of(lengths), IGNORED)),
        lambda b: (b[0], b[1].clamp(min=0), b[1] != IGNORED),
    ),
}

# A mean over what is no padding, of logits (B, T, C), labels and mask. By the loss that a sample has alone all say the
# same; in a batch they weigh its samples by their lengths, or alike.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.movedim(-1, 1), y, reduction="none")


def _flat(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none") * mask.flatten()
    return losses.sum() / mask.sum()


def _packed(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    lengths = mask.sum(1)
    logits, labels = (
        rnn.pack_padded_sequence(part, lengths, batch_first=True, enforce_sorted=False).data for part in (z, y)
    )
    return F.cross_entropy(logits, labels)


LOSSES: dict[str, Loss] = {
    "masked mean": lambda z, y, mask: (_each(z, y) * mask).sum() / mask.sum(),
    "masked mean in two steps": lambda z, y, mask: _each(z, y).mul(mask).sum(1).sum() / mask.sum().clamp(min=1),
    "flat": _flat,
    "chosen places": lambda z, y, mask: F.cross_entropy(z[mask], y[mask]),
    "chosen losses": lambda z, y, mask: _each(z, y)[mask].mean(),
    "masked_select": lambda z, y, mask: _each(z, y).masked_select(mask).mean(),
    "ignore_index": lambda z, y, mask: F.cross_entropy(z.movedim(-1, 1), y.masked_fill(~mask, IGNORED)),
    "ignored, flat": lambda z, y, mask: F.cross_entropy(z.flatten(0, 1), y.masked_fill(~mask, IGNORED).flatten()),
    "sum over places": lambda z, y, mask: (
        F.cross_entropy(z.movedim(-1, 1), y.masked_fill(~mask, IGNORED), reduction="sum") / mask.sum()
    ),
    "masked_fill": lambda z, y, mask: _each(z, y).masked_fill(~mask, 0.0).sum() / mask.sum(),
    "where": lambda z, y, mask: torch.where(mask, _each(z, y), 0.0).sum() / mask.sum(),
    "mean of means": lambda z, y, mask: ((_each(z, y) * mask).sum(1) / mask.sum(1)).mean(),
    "einsum": lambda z, y, mask: torch.einsum("bt,bt->", _each(z, y), mask.to(z.dtype)) / mask.sum(),
    "packed": _packed,
    "binary": lambda z, y, mask: (
        F.binary_cross_entropy_with_logits(z[..., 0], (y == 0).to(z.dtype), weight=mask.to(z.dtype), reduction="sum")
        / mask.sum()
    ),
    "squares": lambda z, y, mask: (F.mse_loss(z[..., 0], y.to(z.dtype), reduction="none") * mask).sum() / mask.sum(),
}


@dataclass(frozen=True)
class Padded:
    """A loss over padded sequences.

    Args:
        loss: Of ``LOSSES``.
        structure: That of the batch, of ``STRUCTURES``.
    """

    loss: str
    structure: str = "mask"

    def batch(self, x: Tensor, y: Tensor) -> Any:
        """A batch of sequences of features (B, 8) and a label: a ramp of both; the lengths depend on the samples."""
        ramp = torch.linspace(1.0, -0.5, LENGTH).to(x.dtype)
        lengths = 1 + (x[:, 0].abs() * 4).long() % LENGTH
        mask = mask_of(lengths)
        labels = (y[:, None] + torch.arange(LENGTH)) % CLASSES
        return STRUCTURES[self.structure][0](x[:, None] * ramp[:, None] * mask[..., None], labels * mask, lengths)

    def read(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, labels and where they are no padding."""
        return STRUCTURES[self.structure][1](batch)

    def of(self, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """The loss."""
        return LOSSES[self.loss](logits, y, mask)
