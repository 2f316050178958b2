"""Weights and their averages are exchanged in place, without a second copy of either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_tricks.core.weights.tensors import buckets, copy_


class Exchange:
    """Exchanges the values of weights and of their averages, bucket by bucket, and back.

    Weights are written in place; averages are replaced by new tensors. Only one bucket (``core.weights.buckets``) takes
    additional memory. After an interruption at any instruction ``run`` can be called again, in either direction,
    without losing a value.

    Args:
        names: The keys of the averages.
        weights: The weights in the order of ``names``.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self.names = names
        self._buckets = buckets(weights)
        self._exchanged = 0  # the number of exchanged buckets, from the first on
        self._open: tuple[slice, int, list[Tensor], list[Tensor]] | None = None

    def run(self, weights: Sequence[Tensor], averages: dict[str, Tensor], *, back: bool = False) -> None:
        """Exchange all values, or exchange them ``back``."""
        self._close(weights, averages)
        step, end = (-1, 0) if back else (1, len(self._buckets))
        while self._exchanged != end:
            bucket = self._buckets[self._exchanged - back]
            with torch.no_grad():
                theirs = [averages[name] for name in self.names[bucket]]
                ours = [w.to(a.device, copy=True) for w, a in zip(weights[bucket], theirs, strict=True)]
            self._open = (bucket, self._exchanged + step, ours, theirs)
            self._close(weights, averages)

    def _close(self, weights: Sequence[Tensor], averages: dict[str, Tensor]) -> None:
        """Finish the open bucket; every line can be run again after an interruption."""
        if self._open is None:
            return
        bucket, exchanged, ours, theirs = self._open
        copy_(weights[bucket], theirs)
        averages.update(zip(self.names[bucket], ours, strict=True))
        self._exchanged = exchanged
        self._open = None
