"""The count of optimizer steps equals the steps that a real fit takes, or it refuses."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, random_split

from lightning_tricks.core.lightning.steps import EpochPlan
from lightning_tricks.schedules import UnknownTotalSteps, flat_cos, optimizer_steps
from tests.nets import Net, Stream, assert_equal, build, data, fit, loader, trainer, weights
from tests.ranks import run_ranks
from tests.schedules.recording import SaveEveryStep, Tiny, ones

ACCUMULATION, EPOCHS, LIMITS, MAX_STEPS = (1, 2, 3), (1, 3), (1.0, 0.5, 2), (-1, 5, 1000)


class Counted(Tiny):
    """Asks for the count in configure_optimizers and again when training starts."""

    def configure_optimizers(self) -> Any:
        self.totals = [optimizer_steps(self.trainer)]
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.totals.append(optimizer_steps(self.trainer))

    @property
    def taken(self) -> int:
        return len(self.optimizer.lrs)


def assert_counts(train: Any = None, module: Counted | None = None, **settings: Any) -> Counted:
    module = module or Counted()
    trainer(**settings).fit(module, train)
    assert module.totals == [module.taken] * 2, settings
    return module


@pytest.mark.few(3)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("batches", [1, 3, 4, 7])
def test_the_count_is_what_a_fit_takes(batches, accumulation):
    for epochs, limit, max_steps in product(EPOCHS, LIMITS, MAX_STEPS):
        if isinstance(limit, int) or int(batches * limit):
            assert_counts(
                ones(batches), max_epochs=epochs, limit_train_batches=limit, max_steps=max_steps,
                accumulate_grad_batches=accumulation,
            )  # fmt: skip


def _counts_on_a_rank(grid: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
    counts = []
    for settings in grid:
        module, arguments = Counted(), {"batches": 7, "max_epochs": 2, **settings}
        train = ones(arguments.pop("batches"), shuffle=True)
        trainer(strategy="ddp", devices=2, **arguments).fit(module, train)
        counts.append((module.totals, module.taken))
    return counts


@pytest.mark.slow
def test_the_count_is_what_two_ranks_take():
    grid: list[dict[str, Any]] = [
        {
            "batches": batches, "max_epochs": epochs, "accumulate_grad_batches": accumulation,
            "limit_train_batches": limit, "max_steps": max_steps,
        }
        for batches, epochs, accumulation, limit, max_steps in product(
            (1, 3, 4, 7), EPOCHS, ACCUMULATION, LIMITS, MAX_STEPS
        )
        if isinstance(limit, int) or int((batches + 1) // 2 * limit)
    ]  # fmt: skip
    grid += [{"use_distributed_sampler": False}, {"max_epochs": -1, "max_steps": 5}, {}]
    ranks = run_ranks(_counts_on_a_rank, grid)
    assert ranks[0] == ranks[1]
    assert [totals for totals, _ in ranks[0]] == [[taken] * 2 for _, taken in ranks[0]]
    assert ranks[0][-1] == ([8, 8], 8)  # 7 samples on two ranks, two epochs: not the 14 of one process


class SizedStream:
    """Batches without a DataLoader; ``size`` None: no length."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter([torch.ones(1, 1)] * (self.size or 4))

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError
        return self.size


def _unequal_ranks() -> list[str]:
    rank, messages = int(os.environ["RANK"]), []
    for sizes in ((3, 4), (3, None)):
        with pytest.raises(UnknownTotalSteps) as raised:
            trainer(strategy="ddp", devices=2).fit(Counted(), SizedStream(sizes[rank]))
        messages.append(str(raised.value))
    return messages


def test_every_rank_refuses_when_their_lengths_differ():
    ranks = run_ranks(_unequal_ranks, timeout=300)
    assert ranks[0] == ranks[1]
    assert all("differs between ranks" in message for message in ranks[0])


class LossPlan(EpochPlan):
    def step_of(self, trainer: L.Trainer, epoch: int) -> tuple[int, int]:
        return epoch + 1, 1

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.accumulate_grad_batches, _ = self.step_of(trainer, trainer.current_epoch)


BATCHES_OF_TWO = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)


@pytest.mark.parametrize(
    ("train", "settings", "steps"),
    [
        (ones(7), {"accumulate_grad_batches": 3}, 2 * 3),  # a ragged window is a step
        (ones(5), {"callbacks": [GradientAccumulationScheduler({0: 4, 1: 1})], "max_epochs": 4}, 2 + 5 + 5 + 5),
        (ones(5), {"callbacks": [GradientAccumulationScheduler({1: 3, 2: 2})], "max_epochs": 4}, 5 + 2 + 3 + 3),
        (ones(5), {"callbacks": [GradientAccumulationScheduler({0: n}) for n in (4, 2)]}, 2 * 3),  # the last counts
        (ones(5), {"callbacks": [LossPlan()], "max_epochs": 3}, 5 + 3 + 2),
        (ones(3), {"callbacks": [Timer()]}, 2 * 3),  # without a duration it does not end training
        (ones(7), {"overfit_batches": 2, "max_epochs": 3}, 3 * 2),
        (ones(7), {"overfit_batches": 0.5, "max_epochs": 3}, 3 * 3),
        (ones(7), {"fast_dev_run": 3}, 3),
        (ones(4), {"max_epochs": -1, "max_steps": 6}, 6),
        (DataLoader(Stream(torch.ones(4, 1))), {"max_epochs": -1, "max_steps": 6}, 6),
        ([ones(4), ones(7)], {}, 2 * 7),
        (SizedStream(5), {}, 2 * 5),  # a length of its own, and no dataset
        (ones(7, batch_size=3, drop_last=True), {}, 2 * 2),
        (ones(7, batch_size=3), {}, 2 * 3),
        (ones(7, batch_sampler=BATCHES_OF_TWO), {}, 2 * 4),
    ],
)
def test_the_count_is_known_in_advance(train, settings, steps):
    assert assert_counts(train, **settings).taken == steps


@pytest.mark.parametrize("limit", [1.0, 0.5, 3])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_a_combined_loader_is_counted(mode, limit):
    combined = CombinedLoader({"a": ones(4), "b": [ones(7), ones(2)]}, mode)
    assert_counts(combined, limit_train_batches=limit, accumulate_grad_batches=2)


def test_counting_leaves_it_to_lightning_to_refuse_a_sequential_loader():
    with pytest.raises(ValueError, match="does not support"):
        assert_counts(CombinedLoader([ones(4), ones(7)], "sequential"))


class Data(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.size = 5

    def train_dataloader(self) -> Any:
        return ones(self.size)


def test_a_data_module_is_counted():
    module = Counted()
    trainer().fit(module, datamodule=Data())
    assert module.totals == [10, 10]


class BringsData(Counted):
    def train_dataloader(self) -> Any:
        return [ones(5), ones(3)]


def test_loaders_of_the_module_are_counted():
    assert assert_counts(module=BringsData()).taken == 10


def test_a_second_fit_counts_its_own_loader():
    run, first, second = trainer(max_epochs=1), Counted(), Counted()
    run.fit(first, ones(3))
    run.fit_loop.epoch_progress.reset()
    run.fit_loop.epoch_loop.reset()
    run.fit(second, ones(5))
    assert (first.totals, second.totals) == ([3, 3], [5, 5])


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # any data will do here
@pytest.mark.parametrize("saved_at", [2, 4, 5])
def test_a_resumed_fit_counts_the_whole_and_not_the_rest(tmp_path, saved_at):
    assert_counts(ones(4), max_epochs=3, callbacks=[SaveEveryStep(tmp_path)])
    resumed = Counted()
    trainer(max_epochs=3).fit(resumed, ones(4), ckpt_path=tmp_path / f"{saved_at}.ckpt", weights_only=True)
    assert (resumed.totals, resumed.taken) == ([12, 12], 12 - saved_at)


class SizedIterable(Stream):
    def __len__(self) -> int:
        return 4


class Manual(Counted):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("reason", "train", "settings"),
    [
        ("no length", DataLoader(Stream(torch.ones(4, 1))), {}),
        ("no length", DataLoader(Stream(torch.ones(4, 1))), {"max_steps": 3}),
        ("no length", DataLoader(SizedIterable(torch.ones(4, 1))), {}),
        ("no length", [ones(3), DataLoader(Stream(torch.ones(4, 1)))], {}),
        ("no length", SizedStream(None), {}),
        ("run forever", ones(3), {"max_epochs": -1}),
        ("max_time", ones(3), {"max_time": timedelta(hours=1)}),
        ("max_time", ones(3), {"callbacks": [Timer(timedelta(hours=1))]}),
        ("reloaded", ones(3), {"reload_dataloaders_every_n_epochs": 1}),
        ("limit_train_batches=0", ones(3), {"limit_train_batches": 0}),
        ("max_epochs=0", ones(3), {"max_epochs": 0}),
        ("max_steps=0", ones(3), {"max_steps": 0}),
    ],
)  # fmt: skip
def test_an_unknown_count_says_why_and_what_to_pass(reason, train, settings):
    with pytest.raises(UnknownTotalSteps, match=rf"{reason}.*; pass total_steps="):
        trainer(**settings).fit(Counted(), train)


@pytest.mark.parametrize("train", [SizedStream(None), ones(3)])
def test_where_the_number_of_steps_can_end_training_the_message_says_so(train):
    settings = {"reload_dataloaders_every_n_epochs": 1} if not isinstance(train, SizedStream) else {}
    with pytest.raises(UnknownTotalSteps) as error:
        trainer(**settings).fit(Counted(), train)
    assert str(error.value).endswith("or end training by Trainer(max_steps=...) in place of max_epochs.")
    assert assert_counts(train, **settings, max_epochs=-1, max_steps=5).taken == 5


def test_manual_optimization_has_no_count():
    with pytest.raises(UnknownTotalSteps, match=r"automatic_optimization=False.*; pass total_steps="):
        trainer().fit(Manual(), ones(3))


def test_a_trainer_that_has_not_started_has_no_count():
    with pytest.raises(UnknownTotalSteps, match=r"no module and data yet.*; pass total_steps="):
        optimizer_steps(trainer())


# What counting must not touch


class Scheduled(Net):
    """flat_cos with the total counted, or given by hand."""

    def __init__(self, total_steps: int | None = None) -> None:
        super().__init__()
        self.total_steps = total_steps

    def configure_optimizers(self) -> Any:
        return flat_cos(super().configure_optimizers(), self, total_steps=self.total_steps, warmup=2)


class Splits(Scheduled):
    """Draws random numbers while it makes its loader."""

    def train_dataloader(self) -> Any:
        train, _ = random_split(data(), [32, 12])
        return DataLoader(train, 8, shuffle=True)


def _mark(path: Any, worker: int) -> None:
    with open(path, "a") as file:
        file.write("started\n")


def assert_counting_changes_nothing(kind: type[Scheduled] = Scheduled, train: Any = None, steps: int = 12) -> None:
    counted, by_hand = build(kind), build(kind, total_steps=steps)
    for module in (counted, by_hand):
        run = trainer()
        L.seed_everything(7, verbose=False)
        run.fit(module, train, loader(24))
        assert run.global_step == steps
    assert_equal(weights(counted), weights(by_hand))


@pytest.mark.parametrize("shuffle", [False, True])
def test_counting_leaves_training_bit_equal(shuffle):
    assert_counting_changes_nothing(train=loader(shuffle=shuffle))


def test_counting_leaves_the_random_numbers_of_a_train_dataloader_alone():
    assert_counting_changes_nothing(Splits, steps=8)


def test_counting_starts_no_workers(tmp_path):
    path = tmp_path / "starts"
    train = DataLoader(data(), 8, shuffle=True, num_workers=1, worker_init_fn=partial(_mark, path))
    assert_counting_changes_nothing(train=train)
    assert len(path.read_text().splitlines()) == 4  # two fits of two epochs


class CountsIterators(DataLoader):
    iterators = 0

    def __iter__(self) -> Any:
        self.iterators += 1
        return super().__iter__()


def test_counting_makes_no_iterator():
    train = CountsIterators(data(), 8)
    fit(build(Scheduled), train=train)
    assert train.iterators == 2
