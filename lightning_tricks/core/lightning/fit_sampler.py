"""The base of samplers that order an epoch for all ranks, and go on where a fit is resumed."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_tricks.core.call_stack import callers
from lightning_tricks.core.checks import MOST, check_count, check_type
from lightning_tricks.core.lightning.fit import fit_of, reading_of

CHECKSUM = "checksum"  # the first word of a setting that stands for the numbers of all samples


class Reader(NamedTuple):
    """Who asks for samples now.

    Args:
        world: The number of ranks with samples of their own.
        rank: The number of this one.
        epoch: The epoch that a fit is about to read; None outside of the fit's own loop.
        batch: The number of the first batch that the fit will train on, which is not 0 after a resume.
        loaders: The training loaders of the fit.
        progress: The Trainer's count of batches, which is in checkpoints.
    """

    world: int
    rank: int
    epoch: int | None = None
    batch: int = 0
    loaders: Sequence[Any] = ()
    progress: Any = None


@dataclass
class _Orders(_ProcessedTracker):
    """Lightning's count of the batches of an epoch, by which it also saves and restores what gave them their order."""

    orders: dict[str, dict[str, Any]] = field(default_factory=dict)  # the settings of the samplers, by their loaders


def find_reader() -> Reader:
    """Ask the Trainer that runs, which is on the stack of calls; outside of a Trainer, the process group.

    A sampler is not told when a fit is resumed, nor the epoch that loader workers are started for: Lightning starts
    them before it calls ``set_epoch``. Its progress is in the checkpoint, and restored before samples are read.
    """
    passed: list[object] = []
    for owner in callers():
        if isinstance(owner, L.Trainer):
            return _reader(owner, passed)
        passed.append(owner)
    if dist.is_available() and dist.is_initialized():
        return Reader(dist.get_world_size(), dist.get_rank())
    return Reader(1, 0)


def _reader(trainer: L.Trainer, passed: list[object]) -> Reader:
    fit_of(trainer).has_read_samplers = True  # has loaders made anew that are read before a checkpoint is restored
    ranks = trainer.distributed_sampler_kwargs or {}  # tensor-parallel ranks share their samples
    world, rank = ranks.get("num_replicas", 1), ranks.get("rank", 0)
    loop = trainer.fit_loop
    loaders = loop._combined_loader.flattened if loop._combined_loader is not None else ()
    batches: Any = loop.epoch_loop.batch_progress
    epochs: Any = loop.epoch_progress.current
    between_epochs = epochs.started == epochs.processed or batches.is_last_batch
    resumed = loop.epoch_loop.restarting  # Otherwise the counts may be those of a fit that failed.
    reading = reading_of(trainer)
    skipped = reading is not None and reading.skips_batches  # those that the epoch has had, by ExactResume
    first = batches.current.processed if resumed and not between_epochs and not skipped else 0
    if loop._data_fetcher is None or not any(owner is loop._data_fetcher for owner in passed):
        # The length, a validation, or another pass over the training samples.
        return Reader(world, rank, None, first, loaders, batches)
    if any(owner is loop.epoch_loop for owner in passed):
        begun = 0 if skipped else batches.current.processed
        return Reader(world, rank, trainer.current_epoch, begun, loaders, batches)
    # Workers are started before the epoch is.
    return Reader(world, rank, epochs.started if between_epochs else epochs.processed, first, loaders, batches)


class FitSampler(DistributedSampler[Any]):
    """Splits an epoch over the ranks, whose number it asks when it is read, and begins where the fit does.

    Lightning leaves a DistributedSampler in its place and tells it the epoch.

    Args:
        numbers: The name of the argument that has a number for each sample, and is one of the subclass.
        shuffle: Whether the order is random.
        seed: The seed of the order, at least 0.
        drop_last: Whether samples that do not fill all ranks are left out.
    """

    settings: ClassVar[tuple[str, ...]]  # the other arguments of a subclass on which the order depends

    def __init__(self, numbers: str, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        check_count("seed", seed, least=0)
        self._numbers = numbers
        samples: Any = getattr(self, numbers)  # torch asks the data set for its length only
        super().__init__(samples, num_replicas=1, rank=0, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def order_settings(self) -> dict[str, Any]:
        """The arguments on which the order of an epoch depends, by the names that an error gives them."""
        settings = {name: getattr(self, name) for name in self.settings}
        return {**settings, f"{CHECKSUM} of the {self._numbers}": self._checksum}

    def _reader(self) -> Reader:
        """Who reads, if the data set is the one of the numbers."""
        reader = find_reader()
        name = type(self).__name__
        known = len(getattr(self, self._numbers))
        for loader in reader.loaders:
            if not self._is_in(loader):
                continue
            try:
                samples = len(loader.dataset)
            except (TypeError, NotImplementedError) as error:
                raise TypeError(
                    f"{name} needs a data set that knows how many samples it has, got {type(loader.dataset).__name__}"
                    " without a length: give it a __len__."
                ) from error
            if samples != known:
                raise ValueError(
                    f"{self._numbers} of {name} must have one entry for each sample, got {known} {self._numbers} and"
                    f" {samples} samples."
                )
        if reader.epoch is not None or any(map(self._is_in, reader.loaders)):
            self._keep_order(reader)
        return reader

    def _begun(self) -> tuple[int, int, Reader]:
        """The epoch that is read, its first batches that were trained on and are to be left out, and who reads."""
        reader = self._reader()
        if reader.epoch is None:
            return self.epoch, 0, reader
        goes_on = any(self._is_in(loader) and hasattr(loader, "load_state_dict") for loader in reader.loaders)
        return reader.epoch, 0 if goes_on else reader.batch, reader  # such a loader leaves them out itself

    def _keep_order(self, reader: Reader) -> None:
        """Have checkpoints hold all that the order of the epoch depends on, and compare it in an epoch that goes on."""
        order = self._order_settings(reader)
        place = str([number for number, loader in enumerate(reader.loaders) if self._is_in(loader)])
        counts = vars(reader.progress.current)
        orders = counts.get("orders", {})
        if reader.batch:
            self._require_same_order(orders.get(place, {}), order)
        if reader.epoch is not None:
            reader.progress.current = _Orders(**{**counts, "orders": {**orders, place: order}})

    def _order_settings(self, reader: Reader) -> dict[str, Any]:
        """All that the order of an epoch depends on, by the names that an error gives them."""
        return {"sampler": type(self).__name__, "ranks": reader.world, **self.order_settings()}

    def _require_same_order(self, before: dict[str, Any], order: dict[str, Any]) -> None:
        """Raise if the resumed epoch was started in another order; ``before`` is empty if another sampler gave it."""
        if before == order:
            return
        names = [name for name in {**before, **order} if before.get(name) != order.get(name)]
        differ = "; ".join(f"{name} was {before.get(name)!r}, now {order.get(name)!r}" for name in names)
        began = f"began with other settings, {differ}" if before else "another sampler began"
        raise MisconfigurationException(
            f"{type(self).__name__} resumes within an epoch that {began}: some samples would come twice and others"
            " never. Resume with those settings, or from a checkpoint of an epoch's end."
        )

    @cached_property
    def _checksum(self) -> str:
        return hashlib.sha256(getattr(self, self._numbers).numpy().tobytes()).hexdigest()[:16]

    def _is_in(self, loader: Any) -> bool:
        batches = getattr(loader, "batch_sampler", None)
        return self in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + epoch)


class BucketSampler(FitSampler):
    """Makes the batches of all ranks by the lengths of their samples."""

    def __init__(self, lengths: Sequence[int] | Tensor, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        check_type("shuffle", shuffle, bool)
        check_type("drop_last", drop_last, bool)
        self.lengths = checked_lengths(lengths)
        super().__init__("lengths", shuffle=shuffle, seed=seed, drop_last=drop_last)

    @abstractmethod
    def batches_of_ranks(self, epoch: int, world: int) -> list[Tensor]:
        """Numbers of samples, batch by batch: those of all ranks in the first step, then in the second, ..."""

    def of_samples(self, samples: Tensor, settings: Mapping[str, Any]) -> BucketSampler:
        """A sampler of some of the samples (n,), with the settings of ``order_settings``."""
        return type(self)(self.lengths[samples], **{name: settings[name] for name in self.settings})

    def _batches_left(self) -> Iterator[list[int]]:
        """The batches of this rank, without those that a resumed epoch has had."""
        epoch, first, reader = self._begun()
        mine = self.batches_of_ranks(epoch, reader.world)[reader.rank :: reader.world]
        return (batch.tolist() for batch in mine[first % max(len(mine), 1) :])  # CombinedLoader may cycle


def checked_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """Lengths as integers (n,), at least one of them.

    Raises:
        TypeError: For what is no sequence of numbers.
        ValueError: For no lengths, other shapes, or values that are no lengths.
    """
    try:
        found = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"lengths must be integers, one for each sample, got {lengths!r}.") from error
    numbers = found.is_floating_point() or found.is_complex() or found.dtype == torch.bool
    if numbers and found.numel():  # torch makes floats of no numbers at all
        raise TypeError(f"lengths must be integers, one for each sample, got {found.dtype}.")
    found = found.long().cpu()
    if found.ndim != 1 or not found.numel():
        raise ValueError(
            f"lengths must be a sequence with one integer for each sample, got shape {tuple(found.shape)}."
        )
    if found.min() < 0 or found.max() > MOST:
        raise ValueError(f"lengths must not be negative, got {int(found.min())} to {int(found.max())}.")
    return found
