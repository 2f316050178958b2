"""Samples drawn so that rare classes come as often as frequent ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_tricks.core.checks import check_range
from lightning_tricks.data.weighted_sampler import DistributedWeightedSampler

__all__ = ["balanced_sampler"]


def balanced_sampler(
    labels: Sequence[Any] | Tensor, *, power: float = 1.0, seed: int = 0
) -> DistributedWeightedSampler:
    """Make a sampler that draws rare classes more often: a sample of class c has the weight ``count[c] ** -power``.

    The classes then have shares in proportion to ``count[c] ** (1 - power)``: equal ones with 1, those of the square
    roots with 0.5, and those of the labels with 0. An epoch is as long as without it, and samples are drawn with
    replacement: samples of a rare class come often, and some of a frequent one not at all.

    Args:
        labels: The class of each sample (n,): numbers, texts or other values that can be compared.
        power: How much of the imbalance is taken out, in [0, 1].
        seed: The seed of the order, the same on all ranks.

    Returns:
        The ``DistributedWeightedSampler``, for one device or many.

    Raises:
        TypeError: For labels that are no values of classes, such as numbers with a fraction.
        ValueError: For a value out of range, or no labels.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = balanced_sampler(["cat", "cat", "cat", "dog"])
        >>> [round(float(weight), 2) for weight in sampler.weights]
        [0.33, 0.33, 0.33, 1.0]
        >>> loader = DataLoader(range(4), batch_size=2, sampler=sampler)
    """
    check_range("power", power, 0.0, 1.0)
    try:
        found: list[Any] = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        found = [label.tolist() if hasattr(label, "tolist") else label for label in found]  # tensors are never equal
        counts = Counter(found)
    except TypeError as error:
        raise TypeError(f"labels must be one class for each sample, got {type(labels).__name__}: {error}.") from error
    if broken := [label for label in counts if isinstance(label, float) and not label.is_integer()]:
        raise TypeError(f"labels must be classes, got the number {broken[0]}: round them to classes first.")
    if not counts:
        raise ValueError("labels must have one class for each sample, got none.")
    return DistributedWeightedSampler([counts[label] ** -power for label in found], seed=seed)
