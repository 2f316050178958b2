"""Two lists of tensors change places without a second copy of either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_tricks.core.weights import buckets, copy_


class Exchange:
    """Exchanges the values of two lists of tensors, bucket by bucket, and takes it back.

    Beyond the lists only one bucket (``core.weights.buckets``) is held. After an interrupt at any instruction
    ``run`` can be called again, in either direction, and nothing is lost.

    Args:
        tensors: The first list, or tensors like it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._buckets = buckets(tensors)
        self._exchanged = 0  # so many buckets, from the first on
        self._open: tuple[slice, int, list[Tensor], bool] | None = None

    def run(self, first: Sequence[Tensor], second: Sequence[Tensor], *, back: bool = False) -> None:
        """Exchange all values, or bring them ``back``."""
        self._close(first, second)
        step, end = (-1, 0) if back else (1, len(self._buckets))
        while self._exchanged != end:
            bucket = self._buckets[self._exchanged - back]
            with torch.no_grad():
                spare = [tensor.clone() for tensor in first[bucket]]
            self._open = (bucket, self._exchanged + step, spare, False)
            self._close(first, second)

    def _close(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
        """Finish the bucket that is open; every line can be run again."""
        if self._open is None:
            return
        bucket, exchanged, spare, half = self._open
        if not half:
            copy_(first[bucket], second[bucket])
            self._open = (bucket, exchanged, spare, True)
        copy_(second[bucket], spare)
        self._exchanged = exchanged
        self._open = None
