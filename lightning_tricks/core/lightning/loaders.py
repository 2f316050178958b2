"""The training loaders of a Trainer: their lengths, larger batches, and another pass over them."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import islice
from typing import Any, final

import lightning as L
import torch
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.trainer.connectors.data_connector import (
    _parse_num_batches,
    _process_dataloader,
    _request_dataloader,
    _resolve_overfit_batches,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_tricks.core.lightning.trainer import extremes, step_arguments


def train_batches_of_sizes(trainer: L.Trainer, multiples: Collection[int]) -> dict[int, int] | None:
    """The number of training batches in an epoch on this rank, by the multiple of the loaders' batch size.

    None if a length cannot be known before the batches are read. ``configure_optimizers`` runs before the fit loop has
    set up its loaders. Setting them up early (``fit_loop.setup_data``, as ``estimated_stepping_batches`` does) would
    start workers, draw random numbers and lose the loaders' own state on resume. So the lengths are computed as
    Lightning does, but without an iterator.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is not None:
        loader = loop._combined_loader
    elif loop._data_source.instance is None or not loop._data_source.is_defined():
        return None
    else:
        loader = _prepared_loader(trainer)
    unknown, found = any(map(_length_unknown, loader.flattened)), {}
    for multiple in sorted(multiples):
        batches = -1 if unknown else _batches(trainer, loader, multiple)
        lowest, highest = extremes(trainer, batches)  # all ranks take part
        if not lowest == highest >= 0:
            return None
        found[multiple] = batches
    return found


def _length_unknown(loader: object) -> bool:
    return sized_len(loader) is None or has_iterable_dataset(loader)


def _length(loader: Any, multiple: int) -> int:
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, ResizableBatches):
        return len(BatchSampler(sampler.sampler, sampler.base * multiple, sampler.drop_last))
    assert multiple == 1, "loaders whose batches grow are resizable"
    return len(loader)


def _batches(trainer: L.Trainer, loader: CombinedLoader, multiple: int) -> int:
    lengths = _limited(trainer, [_length(one, multiple) for one in loader.flattened])
    empty = loader._mode == "max_size_cycle" and 0 in lengths  # an empty loader cannot be cycled
    shortest = empty or loader._mode == "min_size"
    return min(lengths) if shortest else max(lengths)


def _limited(trainer: L.Trainer, lengths: list[int]) -> list[int]:
    limit = trainer.limit_train_batches
    return [int(_parse_num_batches(RunningStage.TRAINING, length, limit)) for length in lengths]


def _prepared_loader(trainer: L.Trainer) -> CombinedLoader:
    """The training loaders with distributed samplers injected, as ``fit_loop.setup_data`` will make them."""
    with isolate_rng():
        source = _request_dataloader(trainer.fit_loop._data_source)
        loaders, mode = (source.iterables, source._mode) if isinstance(source, CombinedLoader) else (source, None)
        combined = CombinedLoader(loaders, mode or "max_size_cycle")
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            _resolve_overfit_batches(combined, mode=RunningStage.TRAINING)
        combined.flattened = [
            _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, one) for one in combined.flattened
        ]
    return combined


@final
class ResizableBatches(BatchSampler):
    """The batches of a plain BatchSampler, whose size may change between epochs; ``base`` is the original size."""

    def __init__(self, batches: BatchSampler) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.base = batches.batch_size


def resizable(loader: Any, trick: str, otherwise: str = "") -> DataLoader[Any]:
    """A copy of a loader whose batches can be resized; the user's own loader may serve validation, too.

    Args:
        loader: A training loader.
        trick: The name of the trick, for the error message.
        otherwise: A further remedy, for the error message.

    Raises:
        MisconfigurationException: For loaders whose batches do not come from a plain BatchSampler.
    """
    sampler, kind = getattr(loader, "batch_sampler", None), type(loader).__name__
    if not isinstance(loader, DataLoader) or type(loader).__len__ is not DataLoader.__len__:
        found = f"a {kind}, which counts its batches itself"
    elif hasattr(loader, "state_dict"):
        found = f"a {kind}, whose state_dict counts batches of one size"
    elif isinstance(loader.dataset, IterableDataset):
        found = f"a {kind} of an IterableDataset"
    elif type(sampler) is not BatchSampler:
        found = f"a {kind} with {'no batch sampler' if sampler is None else type(sampler).__name__}"
    else:
        resizable = copy(loader)  # a DataLoader refuses setattr for these attributes
        resizable.__dict__.update(batch_sampler=ResizableBatches(sampler), batch_size=None, _iterator=None)
        return resizable
    raise MisconfigurationException(
        f"{trick} needs a DataLoader whose batch sampler is torch's BatchSampler, to resize its batches, got {found}."
        f" Use DataLoader(dataset, batch_size=..., sampler=...){otherwise}."
    )


def require_batches(trainer: L.Trainer, multiples: Collection[int], trick: str) -> None:
    """Raise unless epochs of larger batches still have a batch, and as many as ``val_check_interval``."""
    batches, interval = train_batches_of_sizes(trainer, multiples), trainer.val_check_interval
    if batches is None:
        raise MisconfigurationException(
            f"{trick} needs loaders with a length, the same on all ranks, got none. Give the sampler a length, or"
            " pass a DataLoader without a sampler of its own."
        )
    if trainer.check_val_every_n_epoch is None or not trainer.enable_validation or isinstance(interval, float):
        interval = 1
    if (fewest := min(batches.values())) < interval:
        raise MisconfigurationException(
            f"{trick} needs at least {interval} batches in each epoch (val_check_interval, or one to train with), got"
            f" {fewest} with {max(multiples)} times the batch size. Choose a smaller final size, or a fraction as"
            " val_check_interval."
        )


def resize_batches(trainer: L.Trainer, multiple: int) -> None:
    """Set the batch size of the resizable loaders to ``multiple`` times their own, for the epoch that now begins.

    To be called in ``on_train_start`` and ``on_train_epoch_start``, before the fit loop makes the epoch's iterator. In
    the first epoch and after a resume the loop has made it already, and is given another one here.
    """
    loop, loader = trainer.fit_loop, train_loader(trainer)
    samplers = [one.batch_sampler for one in loader.flattened]
    if all(sampler.batch_size == sampler.base * multiple for sampler in samplers):
        return
    for sampler in samplers:
        sampler.batch_size = sampler.base * multiple
    loader.limits = [*_limited(trainer, list(map(len, loader.flattened)))]
    set_batches(trainer, _batches(trainer, loader, multiple))
    if (loop.is_resuming or trainer.current_epoch == 0) and loop._data_fetcher is not None:
        iter(loop._data_fetcher)


def set_batches(trainer: L.Trainer, batches: int) -> None:
    """Let an epoch have so many training batches."""
    trainer.fit_loop.max_batches = batches
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))


def training_steps(trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[tuple[Any, ...]]:
    """Iterate over the arguments of ``training_step`` in an epoch, as Lightning makes them.

    A loader without a length is read for as many batches as the epoch in progress has had.
    """
    length = trainer.num_training_batches
    limit = trainer.fit_loop.batch_idx + 1 if math.isinf(length) else int(length)
    loader = copy(train_loader(trainer))  # iterating over the copy leaves the iterator of the training alone
    for batch_idx, (batch, *_) in enumerate(islice(loader, limit)):
        batch = on_device(trainer, pl_module, batch)
        if batch is not None:  # Lightning skips None
            yield step_arguments(pl_module, batch, batch_idx)


def batches_before_training(trainer: L.Trainer, pl_module: L.LightningModule, trick: str) -> Iterator[Any]:
    """Iterate over the batches of an epoch on this rank, before the fit has begun to read its loaders.

    Args:
        trainer: The Trainer, whose hooks ``setup`` have run.
        pl_module: Its module.
        trick: The name of the trick, for the error message.

    Raises:
        MisconfigurationException: For loaders whose length is unknown, which may be read once only or have no end.
    """
    loader = _prepared_loader(trainer)
    loader.flattened = [_with_own_workers(one) for one in loader.flattened]
    if any(map(_length_unknown, loader.flattened)):
        kinds = " and ".join(type(one).__name__ for one in loader.flattened if _length_unknown(one))
        raise MisconfigurationException(
            f"{trick} reads the training loader once before training, got a {kinds} of an IterableDataset or without a"
            f" length: use a data set with a length, or remove {trick}."
        )
    with loaders_untouched(loader):
        for batch, *_ in islice(loader, _batches(trainer, loader, 1)):
            if (batch := on_device(trainer, pl_module, batch)) is not None:  # Lightning skips None
                yield batch


def _with_own_workers(loader: Any) -> Any:
    """A copy of a loader whose workers would otherwise stay, and draw other random numbers in their second pass."""
    if not getattr(loader, "persistent_workers", False):
        return loader
    other = copy(loader)  # a DataLoader refuses setattr for some attributes
    other.__dict__.update(persistent_workers=False, _iterator=None)
    return other


def on_device(trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> Any:
    """A batch of a loader as Lightning gives it to a step: converted, changed by the hooks, and on the device.

    Batch callbacks treat it as a new batch and end the previous one.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return _call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_loader(trainer: L.Trainer) -> CombinedLoader:
    """The combined loader of the fit; the public ``train_dataloader`` does not say how loaders are combined."""
    loader = trainer.fit_loop._combined_loader
    assert loader is not None, "the Trainer is fitting"
    return loader


@contextmanager
def loaders_untouched(loader: CombinedLoader) -> Iterator[None]:
    """Restore the state of loaders at the end of the block."""
    loaders = loader._state_dicts()
    generators = [(generator, generator.get_state()) for one in loader.flattened for generator in generators_of(one)]
    try:
        yield
    finally:
        loader._load_state_dicts(loaders)
        for generator, state in generators:
            generator.set_state(state)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers draw from."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
