"""Weights and their averages change places without a second copy of either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_tricks.core.weights.tensors import buckets, copy_


class Exchange:
    """Exchanges the values of weights and of their averages, bucket by bucket, and takes it back.

    The weights are written to; of the averages new tensors take the place. Besides them only one bucket
    (``core.weights.buckets``) is held. After an interrupt at any instruction ``run`` can be called again, in either
    direction, and nothing is lost.

    Args:
        names: The keys of the averages.
        weights: The weights in the same order, or tensors like them.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self.names = names
        self._buckets = buckets(weights)
        self._exchanged = 0  # so many buckets, from the first on
        self._open: tuple[slice, int, list[Tensor], list[Tensor]] | None = None

    def run(self, weights: Sequence[Tensor], averages: dict[str, Tensor], *, back: bool = False) -> None:
        """Exchange all values, or bring them ``back``."""
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
        """Finish the bucket that is open; every line can be run again."""
        if self._open is None:
            return
        bucket, exchanged, ours, theirs = self._open
        copy_(weights[bucket], theirs)
        averages.update(zip(self.names[bucket], ours, strict=True))
        self._exchanged = exchanged
        self._open = None
