"""A plain loop that embeds in chunks, with the graphs of all of them at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.loop import Batch, Naive


class NaiveChunks(Naive):
    """Of similar sizes; ``number`` of them for a full batch of eight."""

    depth = 6

    def __init__(self, number: int) -> None:
        self.number = number

    def losses(self, module: Any, batch: Batch, number: int) -> Tensor:
        logits = []
        for chunk in batch[0].tensor_split(self.number if len(batch[0]) > 4 else 1):
            with self.cast():  # each casts the weights by itself, so that the sum of gradients is not in 16 bits
                logits.append(module(chunk))
        with self.cast():
            return F.cross_entropy(torch.cat(logits), batch[1], reduction="none")
