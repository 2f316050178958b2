"""Batches of samples of similar lengths, for a stock DataLoader and any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import final

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

from lightning_tricks.core.call_stack import callers
from lightning_tricks.core.checks import check_count
from lightning_tricks.core.lightning.fit_sampler import BucketSampler

__all__ = ["LengthBuckets"]


def sorted_steps(
    lengths: Tensor, step: int, *, pool: int, drop_last: bool, generator: torch.Generator | None
) -> list[Tensor]:
    """Cut the samples into steps of equal size and similar lengths.

    Samples are shuffled, sorted by length within pools of ``pool`` steps, and cut; then the steps are shuffled. The
    longest tenth of a pool waits for the next one: the longest samples of one pool differ most, and in the last pool
    there are enough of them. Without a generator nothing is shuffled. The last step is filled with samples of the first
    ones, or dropped.

    Args:
        lengths: The length of each sample (n,).
        step: The number of samples in a step.
        pool: The number of steps that are sorted together, at least 1.
        drop_last: Whether samples that fill no step are left out.
        generator: Draws the order; None for the order of the data set.

    Example:
        >>> lengths = torch.tensor([9, 1, 8, 2, 7, 3])
        >>> [step.tolist() for step in sorted_steps(lengths, 2, pool=3, drop_last=False, generator=None)]
        [[1, 3], [5, 4], [2, 0]]
    """
    size = len(lengths)
    order = torch.arange(size) if generator is None else torch.randperm(size, generator=generator)
    steps = size // step if drop_last else math.ceil(size / step)
    order = order.repeat(math.ceil(steps * step / size))[: steps * step]
    waits = step * math.ceil(pool / 10) if pool > 1 else 0
    held: Tensor = order[:0]
    cut: list[Tensor] = []
    for part in order.split(step * pool - waits) if steps else ():
        held = torch.cat([held, part])
        held = held[lengths[held].argsort(stable=True)]
        left = len(order) - step * len(cut) - len(held)  # samples of later pools
        while len(held) > (waits if left else 0):
            cut.append(held[:step])
            held = held[step:]
    return cut if generator is None else [cut[number] for number in torch.randperm(steps, generator=generator).tolist()]


@final
class LengthBuckets(BucketSampler):
    """A sampler whose batches have samples of similar lengths, on all ranks of a step, which reduces padding.

    Samples are shuffled, sorted by length within pools of ``pool`` steps and cut into steps of
    ``batch_size * ranks`` samples, of which rank r takes every ``ranks``-th one, beginning with the r-th; then the
    steps are shuffled. The longest tenth of a pool waits for the next. The order depends on ``seed`` and the epoch.

    Lightning keeps the sampler under DDP, where it splits the steps itself, and tells it the epoch. A fit that is
    resumed within an epoch goes on with the samples that an unbroken one has, also with loader workers: Lightning's
    warning that the "dataloader is not resumable" does not apply. Checkpoints hold what the order depends on: within an
    epoch another order is refused, that for another number of ranks too, and at the end of an epoch it may be changed.
    With ``ExactResume`` or ``Preemption`` it may be changed within an epoch, too: the samples left get new buckets.

    Args:
        lengths: The length of each sample (n,), in tokens or any other unit.
        batch_size: The ``batch_size`` of the DataLoader, which is that of one rank.
        pool: The number of steps that are sorted together, at least 1: more give less padding, fewer more chance.
        shuffle: Whether the order is random; otherwise the steps of a pool go from short to long.
        seed: The seed of the order, the same on all ranks.
        drop_last: Whether samples that do not fill a step of all ranks are left out; otherwise some samples are there
            twice, as with torch's DistributedSampler.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, and when read: if the DataLoader has another batch size, or its data set
            another number of samples.
        MisconfigurationException: When read, if the fit resumes within an epoch that began in another order.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> texts = ["a", "bcdefg", "hi", "jklmno"]
        >>> sampler = LengthBuckets([len(text) for text in texts], batch_size=2, shuffle=False)
        >>> list(DataLoader(texts, batch_size=2, sampler=sampler))
        [['a', 'hi'], ['bcdefg', 'jklmno']]
    """

    settings = ("batch_size", "pool", "shuffle", "seed", "drop_last")

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        batch_size: int,
        *,
        pool: int = 50,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        check_count("batch_size", batch_size)
        check_count("pool", pool)
        super().__init__(lengths, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.batch_size = batch_size
        self.pool = pool

    @override
    def batches_of_ranks(self, epoch: int, world: int) -> list[Tensor]:
        steps = sorted_steps(
            self.lengths,
            self.batch_size * world,
            pool=self.pool,
            drop_last=self.drop_last,
            generator=self._generator(epoch) if self.shuffle else None,
        )
        return [step[rank::world] for step in steps for rank in range(world)]

    @override
    def __iter__(self) -> Iterator[int]:
        self._refuse_others(next(callers(), None))
        return chain.from_iterable(self._batches_left())

    @override
    def __len__(self) -> int:
        self._refuse_others(next(callers(), None))
        step = self.batch_size * self._reader().world
        steps = len(self.lengths) / step
        return self.batch_size * (math.floor(steps) if self.drop_last else math.ceil(steps))

    def _refuse_others(self, caller: object) -> None:
        """Raise if a BatchSampler that cuts the samples into other batches asks for them, or a loader without one."""
        if isinstance(caller, DataLoader) and caller.batch_sampler is self:
            raise ValueError(
                "LengthBuckets gives samples, not batches, and is the batch_sampler of a DataLoader: use"
                f" DataLoader(dataset, batch_size={self.batch_size}, sampler=...)."
            )
        if isinstance(caller, BatchSampler) and caller.batch_size != self.batch_size:
            raise ValueError(
                f"LengthBuckets(batch_size={self.batch_size}) is in a DataLoader with batches of {caller.batch_size}:"
                " pass both the same batch_size, and no callback that changes it."
            )
