"""Batches of as many samples as fit a number of tokens, for a stock DataLoader and any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset
from typing_extensions import override

from lightning_tricks.core.call_stack import callers
from lightning_tricks.core.checks import check_count
from lightning_tricks.core.lightning.fit_sampler import BucketSampler

__all__ = ["BatchedDataset", "TokenBuckets"]

ALIKE = 0.9  # samples of a band have at least this part of its longest length


def length_bands(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Cut lengths in descending order into bands of similar lengths, and find the batch size of each.

    The lengths of a band are at least 0.9 of its longest, or it is one batch. Any ``batch_size`` samples of it fit
    ``max_tokens``, so that they may be shuffled, and the number of batches is the same in every epoch.

    Args:
        lengths: Lengths in descending order, at most ``max_tokens``.
        max_tokens: The largest product of the number of samples and the longest length in a batch.

    Returns:
        The number of samples and the batch size of each band.

    Example:
        >>> length_bands([10, 9, 9, 5, 5, 5, 5, 2], max_tokens=20)
        [(2, 2), (2, 2), (4, 4)]
    """
    bands, start = [], 0
    while start < len(lengths):
        longest = max(lengths[start], 1)
        size, end = max_tokens // longest, start
        while end < len(lengths) and lengths[end] >= ALIKE * longest:
            end += 1
        samples = min(max((end - start) // size, 1) * size, len(lengths) - start)
        bands.append((samples, size))
        start += samples
    return bands


@final
class TokenBuckets(BucketSampler):
    """A sampler of batches of similar lengths, padded to at most ``max_tokens`` tokens, on all ranks of a step.

    Every batch is a list of numbers of samples with ``len(batch) * longest length <= max_tokens``, so that the memory
    of a step is bounded and short samples come in large batches. Samples change places with those that are at most a
    tenth shorter; the batches of a step are neighbours in length, and the order of steps is random. All ranks have the
    same number of batches, which no epoch changes. Order, ranks and resume are as with ``LengthBuckets``: another order
    within an epoch is refused.

    DDP gives the gradients of all ranks the same weight, and the batches of a step have nearly the same number of
    tokens, but not of samples: let the loss be a mean over tokens.

    Args:
        lengths: The length of each sample (n,), in tokens or any other unit.
        max_tokens: The largest product of the number of samples and the longest length in a batch.
        shuffle: Whether the order is random; otherwise it goes from long to short.
        seed: The seed of the order, the same on all ranks.
        drop_last: Whether batches that do not fill a step of all ranks are left out; otherwise some are there twice.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, such as a length above ``max_tokens``, and when read: if the DataLoader
            makes batches itself, or its data set has another number of samples.
        MisconfigurationException: When read, if the fit resumes within an epoch that began in another order.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> texts = ["a", "bcdefg", "hi", "jklmno"]
        >>> sampler = TokenBuckets([len(text) for text in texts], max_tokens=12, shuffle=False)
        >>> list(DataLoader(BatchedDataset(texts), batch_size=None, sampler=sampler, collate_fn=list))
        [['bcdefg', 'jklmno'], ['hi', 'a']]
    """

    settings = ("max_tokens", "shuffle", "seed", "drop_last")

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        check_count("max_tokens", max_tokens)
        super().__init__(lengths, shuffle=shuffle, seed=seed, drop_last=drop_last)
        if (longest := int(self.lengths.max())) > max_tokens:
            raise ValueError(
                f"max_tokens must be at least the longest of lengths, {longest}, got {max_tokens}: cut or leave out"
                " longer samples."
            )
        self.max_tokens = max_tokens
        self._order = self.lengths.argsort(descending=True, stable=True)
        self._bands = length_bands(self.lengths[self._order].tolist(), max_tokens)

    @override
    def batches_of_ranks(self, epoch: int, world: int) -> list[Tensor]:
        generator = self._generator(epoch)
        batches: list[Tensor] = []
        for band, (samples, size) in zip(self._order.split([n for n, _ in self._bands]), self._bands, strict=True):
            chosen = band[torch.randperm(samples, generator=generator)] if self.shuffle else band
            batches += chosen.split(size)
        steps = self._steps(world)
        batches = (batches * world)[: steps * world]  # the first batches again, where some are missing
        places = torch.randperm(steps, generator=generator).tolist() if self.shuffle else range(steps)
        return [batch for step in places for batch in batches[step * world : (step + 1) * world]]

    def _steps(self, world: int) -> int:
        batches = sum(math.ceil(samples / size) for samples, size in self._bands)
        return batches // world if self.drop_last else math.ceil(batches / world)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        self._refuse_batches(next(callers(), None))
        return self._batches_left()

    @override
    def __len__(self) -> int:
        self._refuse_batches(next(callers(), None))
        return self._steps(self._reader().world)

    def _refuse_batches(self, caller: object) -> None:
        """Raise if a BatchSampler, which makes batches of what are batches, asks for them."""
        if isinstance(caller, BatchSampler):
            raise ValueError(
                f"TokenBuckets(max_tokens={self.max_tokens}) makes the batches, and so does the DataLoader: use"
                " DataLoader(BatchedDataset(dataset), batch_size=None, sampler=...)."
            )


@final
class BatchedDataset(Dataset[Any]):
    """A data set whose item for a list of indices is the list of those samples, as ``TokenBuckets`` needs it.

    A ``DataLoader(..., batch_size=None)`` gives such a list to its ``collate_fn``, which has to be passed.

    Args:
        dataset: A data set with ``__getitem__`` for one number, and a length.

    Example:
        >>> BatchedDataset("abcd")[[1, 3]]
        ['b', 'd']
    """

    def __init__(self, dataset: Any) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(f"dataset must have __getitem__ and a length, got {dataset!r}.")
        self.dataset = dataset

    def __getitem__(self, numbers: Sequence[int]) -> list[Any]:
        """The samples with these numbers."""
        return [self.dataset[number] for number in numbers]

    def __len__(self) -> int:
        return len(self.dataset)
