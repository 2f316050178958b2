"""Samples drawn by weights, for a stock DataLoader and any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, check_count
from lightning_tricks.core.lightning.fit_sampler import FitSampler, Reader

__all__ = ["DistributedWeightedSampler"]


def weighted_order(weights: Tensor, count: int, *, replacement: bool, generator: torch.Generator) -> Tensor:
    """Draw samples one after the other, each with a probability in proportion to its weight.

    With replacement the n-th draw is the first sample whose cumulated weights exceed ``u[n] * sum(weights)``, ``u``
    uniform in [0, 1). Without, the samples come in the order of ``e / weights``, ``e`` exponential, which is that of
    draws among those that are left.

    Args:
        weights: The weight of each sample (n,), at least 0, in double precision.
        count: The number of draws.
        replacement: Whether a sample may come again.
        generator: Draws the random numbers, on the CPU.

    Example:
        >>> weights = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
        >>> drawn = weighted_order(weights, 400, replacement=True, generator=torch.Generator().manual_seed(0))
        >>> drawn.bincount().tolist()
        [97, 0, 303]
    """
    if not replacement:
        waits = torch.empty_like(weights).exponential_(generator=generator) / weights
        return waits.argsort(stable=True)[:count]
    cumulated = weights.cumsum(0)
    drawn = torch.rand(count, dtype=weights.dtype, generator=generator) * cumulated[-1]
    return torch.searchsorted(cumulated, drawn, right=True)


@final
class DistributedWeightedSampler(FitSampler):
    """A sampler that draws samples by their weights, of which every rank takes its own part.

    In an epoch ``num_samples`` samples are drawn, for all ranks together; rank r takes every ``ranks``-th one, from
    the r-th on, so that a step of all ranks is the batch that one process would have. If they do not fill the ranks,
    the first ones come again. The order depends on ``seed`` and the epoch.

    Lightning keeps the sampler under DDP, and tells it the epoch; torch's WeightedRandomSampler it wraps, and each rank
    draws for itself. A fit that is resumed within an epoch goes on with the samples that an unbroken one has, also with
    loader workers: Lightning's warning that the "dataloader is not resumable" does not apply. Checkpoints hold what the
    order depends on: within an epoch another order is refused, that for another number of ranks or another batch size,
    too, and at the end of an epoch it may be changed. With ``ExactResume`` or ``Preemption`` it may be changed within
    an epoch, but for the weights: the samples that are left are dealt out anew.

    Args:
        weights: The weight of each sample (n,), at least 0; only their ratios matter.
        num_samples: The number of samples in an epoch, those of all ranks together; None for as many as there are
            weights.
        replacement: Whether a sample may come again within an epoch. Without, the weights only decide which samples
            come, and which come first: as many draws as samples are a shuffled epoch.
        seed: The seed of the order, the same on all ranks.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range; without replacement, for fewer weights above 0 than ``num_samples``; when
            read, if the data set has another number of samples.
        MisconfigurationException: When read, if the fit resumes within an epoch that began in another order, or with a
            batch sampler that has no ``batch_size``.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = DistributedWeightedSampler([1.0, 0.0, 3.0], num_samples=6, seed=2)
        >>> list(DataLoader(["a", "b", "c"], batch_size=3, sampler=sampler))
        [['c', 'a', 'c'], ['c', 'c', 'c']]

    References:
        Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006 (without replacement).
    """

    settings = ("num_samples", "replacement", "seed")

    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        *,
        num_samples: int | None = None,
        replacement: bool = True,
        seed: int = 0,
    ) -> None:
        check_bool("replacement", replacement)
        check_count("num_samples", num_samples, optional=True)
        self.weights = checked_weights(weights)
        super().__init__("weights", shuffle=True, seed=seed, drop_last=False)
        self.num_samples = len(self.weights) if num_samples is None else num_samples  # torch's own is that of a rank
        self.replacement = replacement
        if not replacement and self.num_samples > (drawn := int(self.weights.count_nonzero())):
            raise ValueError(
                f"num_samples must be at most the {drawn} samples with a weight above 0 where replacement=False, got"
                f" {self.num_samples}: draw fewer, or with replacement=True."
            )

    def order_of(self, settings: Mapping[str, Any], epoch: int, world: int) -> Tensor:
        """The samples of all ranks in an epoch, step by step.

        Args:
            settings: Those of the order, as of ``order_settings``, with the present weights.
            epoch: The epoch.
            world: The number of ranks.
        """
        count = settings["num_samples"]
        generator = torch.Generator().manual_seed(settings["seed"] + epoch)
        drawn = weighted_order(self.weights, count, replacement=settings["replacement"], generator=generator)
        return drawn.repeat(math.ceil(world / count) + 1)[: world * math.ceil(count / world)]

    @override
    def __iter__(self) -> Iterator[int]:
        epoch, first, reader = self._begun()
        mine = self.order_of(self.order_settings(), epoch, reader.world)[reader.rank :: reader.world]
        return iter(mine[self._samples_of(first, reader) if first else 0 :].tolist())

    @override
    def __len__(self) -> int:
        return math.ceil(self.num_samples / self._reader().world)

    def _samples_of(self, batches: int, reader: Reader) -> int:
        """The number of samples of this rank in the first batches of an epoch."""
        size, drop_last = self._cut(reader)
        assert size is not None, "_order_settings has raised"
        samples = math.ceil(self.num_samples / reader.world)
        whole = samples // size if drop_last else math.ceil(samples / size)
        return batches % max(whole, 1) * size  # CombinedLoader may cycle

    def _cut(self, reader: Reader) -> tuple[int | None, bool]:
        """The size of the batches that a loader makes of the samples, and whether an incomplete one is dropped."""
        loader = next(filter(self._is_in, reader.loaders), None)
        if loader is not None and loader.batch_sampler is None:
            return 1, False
        cut = getattr(loader, "batch_sampler", None)
        return getattr(cut, "batch_size", None), getattr(cut, "drop_last", False)

    @override
    def _order_settings(self, reader: Reader) -> dict[str, Any]:
        size, _ = self._cut(reader)
        if reader.batch and size is None:
            raise MisconfigurationException(
                "DistributedWeightedSampler resumes within an epoch of batches whose size no batch_size tells: use"
                " DataLoader(dataset, batch_size=..., sampler=...), or resume from a checkpoint of an epoch's end."
            )
        return {**super()._order_settings(reader), "batch_size": size}


def checked_weights(weights: Sequence[float] | Tensor) -> Tensor:
    """Weights in double precision (n,), at least one of them above 0.

    Raises:
        TypeError: For what is no sequence of numbers.
        ValueError: For other shapes, or values that are no weights.
    """
    try:
        found = torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"weights must be numbers, one for each sample, got {weights!r}.") from error
    if found.is_complex():
        raise TypeError(f"weights must be real numbers, one for each sample, got {found.dtype}.")
    found = found.detach().to("cpu", torch.float64, copy=True)
    if found.ndim != 1 or not found.numel():
        raise ValueError(f"weights must be a sequence with one number for each sample, got shape {tuple(found.shape)}.")
    if not (found.isfinite() & (found >= 0)).all() or not 0 < found.sum() < math.inf:
        raise ValueError(
            "weights must be finite and not negative, with a sum above 0, got"
            f" {float(found.min()):g} to {float(found.max()):g}."
        )
    return found
