"""Batches cut to some of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_tricks.core.batches.paths import fields, parts, put


def select_samples(batch: Any, samples: Tensor, size: int) -> Any:
    """The batch with these samples of its ``size`` only, in everything that has one entry a sample.

    That is every tensor and array with this first dimension, and every list inside the batch of this length, unless it
    holds such tensors.
    """
    if isinstance(batch, Tensor):
        return batch[samples] if batch.ndim and len(batch) == size else batch
    if type(batch).__module__ == "numpy" and getattr(batch, "shape", ())[:1] == (size,):
        return batch[samples.cpu().numpy()]
    for name, value in list(parts(batch)):
        if isinstance(value, tuple | list) and not fields(value) and len(value) == size and not _batched(value, size):
            new = type(value)([value[sample] for sample in samples.tolist()])
        else:
            new = select_samples(value, samples, size)
        if new is not value:
            batch = put(batch, (name,), new)
    return batch


def _batched(values: Sequence[Any], size: int) -> bool:
    batched = [isinstance(value, Tensor) and value.shape[:1] == (size,) for value in values]
    return all(batched) or (any(batched) and not all(isinstance(value, Tensor) for value in values))
