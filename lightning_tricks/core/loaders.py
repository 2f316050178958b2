"""A Trainer's training loaders: every touch of a private Lightning name about them, each with its reason.

``tests/core/test_loaders.py`` fails when one of those names moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.connectors.data_connector import (
    _parse_num_batches,
    _process_dataloader,
    _request_dataloader,
    _resolve_overfit_batches,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_tricks.core.ranks import extremes
from lightning_tricks.core.replay import generators_of
from lightning_tricks.core.trial import step_arguments


def train_batches(trainer: pl.Trainer) -> int | None:
    """Training batches of one epoch on this rank; None if that cannot be known before they are read.

    ``configure_optimizers`` runs before the fit loop has set its loaders up. Doing so early
    (``fit_loop.setup_data``, as ``estimated_stepping_batches`` does) would start their workers, draw random numbers
    and lose the loaders' own state on resume, so the lengths are found in Lightning's way without an iterator.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is not None:
        loader = loop._combined_loader
    elif loop._data_source.instance is None or not loop._data_source.is_defined():
        return None
    else:
        loader = _prepared_loader(trainer)
    batches = -1 if any(map(_length_unknown, loader.flattened)) else _batches(trainer, loader)
    lowest, highest = extremes(trainer, batches)  # in which every rank takes part
    return batches if lowest == highest >= 0 else None


def _length_unknown(loader: object) -> bool:
    return sized_len(loader) is None or has_iterable_dataset(loader)


def _batches(trainer: pl.Trainer, loader: CombinedLoader) -> int:
    lengths = [
        _parse_num_batches(RunningStage.TRAINING, len(each), trainer.limit_train_batches) for each in loader.flattened
    ]
    return int(min(lengths) if loader._mode == "min_size" else max(lengths))


def _prepared_loader(trainer: pl.Trainer) -> CombinedLoader:
    """The training loaders with distributed samplers injected, as ``fit_loop.setup_data`` will make them."""
    with isolate_rng():
        source = _request_dataloader(trainer.fit_loop._data_source)
        loaders, mode = (source.iterables, source._mode) if isinstance(source, CombinedLoader) else (source, None)
        combined = CombinedLoader(loaders, mode or "max_size_cycle")
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            _resolve_overfit_batches(combined, mode=RunningStage.TRAINING)
        combined.flattened = [
            _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, each) for each in combined.flattened
        ]
    return combined


def training_steps(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[tuple[Any, ...]]:
    """The arguments of ``training_step`` for each batch of an epoch, as Lightning makes them.

    The module's hook before the transfer has a private name that knows whether it is the module's or the data module's.
    A loader without a length is read for as many batches as the epoch in progress has had.
    """
    length = trainer.num_training_batches
    limit = trainer.fit_loop.batch_idx + 1 if math.isinf(length) else int(length)
    loader = copy(train_loader(trainer))  # to iterate over it leaves the iterator of the training alone
    for batch_idx, (batch, *_) in enumerate(islice(loader, limit)):
        batch = trainer.precision_plugin.convert_input(batch)
        batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        if batch is not None:  # which Lightning skips
            yield step_arguments(pl_module, batch, batch_idx)


def train_loader(trainer: pl.Trainer) -> CombinedLoader:
    """The loaders of the fit in progress together; the public ``train_dataloader`` does not tell how they combine."""
    loader = trainer.fit_loop._combined_loader
    assert loader is not None, "the Trainer is fitting"
    return loader


@contextmanager
def loaders_untouched(trainer: pl.Trainer) -> Iterator[None]:
    """Let the training loaders go on after the block as if not read in it; their state has only private names."""
    loader = train_loader(trainer)
    loaders = loader._state_dicts()
    generators = [(generator, generator.get_state()) for each in loader.flattened for generator in generators_of(each)]
    try:
        yield
    finally:
        loader._load_state_dicts(loaders)
        for generator, state in generators:
            generator.set_state(state)
