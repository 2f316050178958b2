"""The training loaders of a Trainer, and one test for each private Lightning name that core/loaders.py stands on.

A test named ``test_lightning_...`` that fails says that Lightning has moved what its message names.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from lightning_tricks.core.lightning.loaders import (
    loaders_untouched,
    resizable,
    resize_batches,
    train_batches_of_sizes,
    train_loader,
    training_steps,
)
from tests.nets import PlainNet, Stream, build, data, fit, loader, trainer

MODES = ("min_size", "max_size", "max_size_cycle")  # and "sequential", which the fit loop refuses

# -- loaders ----------------------------------------------------------------------------------------------------------


def train_batches(trainer: Any) -> int | None:
    """Of loaders as they are."""
    found = train_batches_of_sizes(trainer, (1,))
    return None if found is None else found[1]


class Counting(PlainNet):
    """Notes the number of training batches at each moment, and the random state around asking."""

    def configure_optimizers(self) -> Any:
        loop = self.trainer.fit_loop
        assert loop._combined_loader is None, "fit_loop._combined_loader is set before configure_optimizers now"
        assert loop._data_source.instance is not None, "fit_loop._data_source.instance is not the data's owner any more"
        assert loop._data_source.is_defined(), "fit_loop._data_source.is_defined() is not true in configure_optimizers"
        before = torch.get_rng_state()
        self.counts = [train_batches(self.trainer)]
        self.random_untouched = torch.equal(torch.get_rng_state(), before)
        self.nothing_set_up = loop._combined_loader is None
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        loop = self.trainer.fit_loop
        assert isinstance(loop._combined_loader, CombinedLoader), "fit_loop._combined_loader is no CombinedLoader"
        self.counts.append(train_batches(self.trainer))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch if isinstance(batch[0], Tensor) else next(part for part in batch if part is not None)
        return F.cross_entropy(self(x), y)


@pytest.mark.parametrize(
    "settings", [{}, {"limit_train_batches": 0.5}, {"limit_train_batches": 4}, {"overfit_batches": 2}]
)
@pytest.mark.parametrize("mode", [None, *MODES])
def test_the_batches_counted_early_are_those_of_the_fit(mode: str | None, settings: dict[str, Any]) -> None:
    loaders = loader() if mode is None else CombinedLoader([loader(24), loader(44)], mode)
    module = build(Counting)
    run = trainer(max_epochs=1, limit_val_batches=0, **settings)
    run.fit(module, loaders, loader(8))
    taken = run.fit_loop.epoch_loop.batch_progress.total.completed
    assert module.counts == [taken, taken]
    assert run.num_training_batches == taken
    assert module.random_untouched
    assert module.nothing_set_up


class Drawing(Counting):
    def train_dataloader(self) -> Any:
        torch.rand(1)
        return loader(shuffle=True)


def test_a_loader_that_draws_random_numbers_may_be_asked_early() -> None:
    module = build(Drawing)
    trainer(max_epochs=1, limit_val_batches=0).fit(module, val_dataloaders=loader(8))
    assert module.counts == [6, 6]
    assert module.random_untouched


def test_overfitting_counts_the_dataset_and_not_its_sampler() -> None:
    samples, module = data(44), build(Counting)
    batches = DataLoader(samples, 8, sampler=RandomSampler(samples, replacement=True, num_samples=100))
    run = trainer(max_epochs=1, overfit_batches=0.5)
    with pytest.warns(UserWarning, match="overfit"):
        run.fit(module, batches, loader(24))
    assert module.counts == [3, 3]
    assert run.global_step == 3


class SizedStream(Stream):
    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize("stream", [Stream, SizedStream])
@pytest.mark.parametrize("together", [False, True])
# Lightning's advice about a stream with a length
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_a_stream_is_not_counted_whatever_it_says(stream: type[Stream], together: bool) -> None:
    batches = DataLoader(stream(data(16)), 4)
    module = build(Counting)
    run = trainer(max_epochs=1, limit_val_batches=0)
    run.fit(module, CombinedLoader([batches, loader()], "min_size") if together else batches, loader(8))
    assert module.counts == [None, None]


def test_without_data_nothing_is_counted() -> None:
    assert train_batches(trainer()) is None


def test_lightning_asks_processes_and_limits_loaders_as_ever() -> None:
    signatures = {
        name: list(inspect.signature(getattr(data_connector, name)).parameters)
        for name in ("_request_dataloader", "_process_dataloader", "_parse_num_batches", "_resolve_overfit_batches")
    }
    assert signatures == {
        "_request_dataloader": ["data_source"],
        "_process_dataloader": ["trainer", "trainer_fn", "stage", "dataloader"],
        "_parse_num_batches": ["stage", "length", "limit_batches"],
        "_resolve_overfit_batches": ["combined_loader", "mode"],
    }, "a loader function of Lightning's data connector takes other arguments now"


def test_lightning_gives_the_loader_that_was_attached() -> None:
    run, batches = trainer(), loader()
    run.strategy.connect(build())
    run._data_connector.attach_data(build(), train_dataloaders=batches)
    assert run.fit_loop._combined_loader is None, "attaching data leaves fit_loop._combined_loader set"
    source = run.fit_loop._data_source
    assert data_connector._request_dataloader(source) is batches, "_request_dataloader gives another loader"
    processed = data_connector._process_dataloader(run, TrainerFn.FITTING, RunningStage.TRAINING, batches)
    assert len(processed) == len(batches), "_process_dataloader changes the length on one device"


@pytest.mark.parametrize(
    ("length", "limit", "batches"), [(10, 1.0, 10), (10, 0.35, 3), (10, 4, 4), (10, 40, 10), (0, 0.5, 0)]
)
def test_lightning_limits_batches_as_ever(length: int, limit: Any, batches: int) -> None:
    found = data_connector._parse_num_batches(RunningStage.TRAINING, length, limit)
    assert found == batches, "_parse_num_batches limits differently"


def test_lightning_turns_shuffling_off_to_overfit() -> None:
    combined = CombinedLoader([loader(shuffle=True)], "max_size_cycle")
    assert isinstance(combined.flattened[0].sampler, RandomSampler)
    with pytest.warns(UserWarning, match="overfit"):
        data_connector._resolve_overfit_batches(combined, mode=RunningStage.TRAINING)
    assert isinstance(combined.flattened[0].sampler, SequentialSampler), "_resolve_overfit_batches does something else"


def test_lightning_combines_loaders_in_the_known_modes() -> None:
    assert set(_SUPPORTED_MODES) == {*MODES, "sequential"}, "CombinedLoader has other modes"
    with pytest.raises(ValueError, match="sequential"):
        trainer(limit_val_batches=0).fit(build(), CombinedLoader([loader()], "sequential"), loader(8))
    for mode in MODES:
        combined = CombinedLoader([loader(), loader(24)], mode)
        assert combined._mode == mode, "CombinedLoader._mode is not its mode any more"
        assert len(combined.flattened) == 2, "CombinedLoader.flattened is not its loaders any more"


# -- the fit in progress ----------------------------------------------------------------------------------------------


class Reads(Callback):
    """Reads the training batches once more in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            with loaders_untouched(train_loader(trainer)):
                self.steps = list(training_steps(trainer, pl_module))
            self.loader = train_loader(trainer)


def test_the_batches_of_an_epoch_are_read_as_lightning_reads_them() -> None:
    reads = Reads()
    fit(build(PlainNet), callbacks=[reads], limit_train_batches=4, max_epochs=1)
    expected = list(loader())[:4]
    assert [index for _, index in reads.steps] == [0, 1, 2, 3]
    for (batch, _), other in zip(reads.steps, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
    assert reads.loader._mode in _SUPPORTED_MODES, "fit_loop._combined_loader is not the combined loader any more"


def test_reading_them_leaves_the_training_alone() -> None:
    def shuffled() -> DataLoader[Any]:
        return DataLoader(data(), 8, shuffle=True, generator=torch.Generator().manual_seed(5))

    plain, reading = build(PlainNet), build(PlainNet)
    fit(plain, train=shuffled())
    fit(reading, train=shuffled(), callbacks=[Reads()])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), reading.parameters(), strict=True))


def test_lightning_prepares_batches_and_keeps_loader_states_as_ever() -> None:
    assert "dataloader_idx" in inspect.signature(L.LightningModule._on_before_batch_transfer).parameters
    combined = CombinedLoader([loader()])
    iter(combined)
    assert combined._state_dicts() == [], "CombinedLoader._state_dicts is not the states of its stateful loaders"
    combined._load_state_dicts([])


# -- batches that are resized -----------------------------------------------------------------------------------------


def test_a_resizable_loader_is_another_one_over_the_same_samples() -> None:
    train = loader(batch_size=8)
    twin = resizable(train, "Trick")
    twin.batch_sampler.batch_size = 16
    assert [len(x) for x, _ in train] == [8] * 5 + [4]
    assert [len(x) for x, _ in twin] == [16, 16, 12]
    assert (len(train), len(twin)) == (6, 3)
    assert twin.sampler is train.sampler
    assert twin.dataset is train.dataset


def test_torch_keeps_the_iterator_of_persistent_workers() -> None:
    train = DataLoader(data(), 8, num_workers=1, persistent_workers=True)
    iterator = iter(train)
    assert train._iterator is iterator, "DataLoader._iterator is not what a resizable twin must not share any more"
    assert [len(x) for x, _ in resizable(train, "Trick")] == [8] * 5 + [4]
    assert train._iterator is iterator


class Resizes(Callback):
    """Gives larger batches in each epoch, and keeps what the fit loop knows of them."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        resize_batches(trainer, trainer.current_epoch + 1)
        self.seen = [*getattr(self, "seen", []), (trainer.num_training_batches, trainer.val_check_batch)]
        self.counted = train_batches_of_sizes(trainer, {1, 2, 3})


def test_lightning_reads_an_epochs_batches_anew_as_ever() -> None:
    resizes = Resizes()
    run = trainer(callbacks=[resizes], max_epochs=3, val_check_interval=0.5)
    run.fit(build(PlainNet), resizable(loader(batch_size=4), "Trick"), loader(8))
    taken = run.fit_loop.epoch_loop.batch_progress.total.completed
    assert resizes.seen == [(11, 5), (6, 3), (4, 2)]
    assert taken == 11 + 6 + 4, "the fit loop does not take fit_loop.max_batches and CombinedLoader.limits any more"
    assert resizes.counted == {1: 11, 2: 6, 3: 4}
    assert not run.fit_loop.is_resuming, "fit_loop.is_resuming is not false without a checkpoint"
    assert hasattr(run.fit_loop, "_data_fetcher"), (
        "fit_loop._data_fetcher is not the iterator over the loaders any more"
    )


@dataclass
class Named(_ProcessedTracker):
    """A count with a field more."""

    name: str = ""


def test_lightning_saves_and_restores_a_field_more_in_the_count_of_batches() -> None:
    loop, other = trainer().fit_loop, trainer().fit_loop
    assert type(loop.epoch_loop.batch_progress.current) is _ProcessedTracker
    loop.epoch_loop.batch_progress.current = Named(processed=3, name="a")
    other.load_state_dict(loop.state_dict())
    assert vars(other.epoch_loop.batch_progress.current)["name"] == "a", (
        "a _ProcessedTracker drops what it does not know"
    )
    assert other.epoch_loop.batch_progress.current.processed == 3
