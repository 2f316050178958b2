"""LengthBuckets: alike lengths in a batch and over the ranks, every sample once an epoch, and resumed epochs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from lightning_tricks.data.length_buckets import sorted_steps
from tests.nets import PlainNet, spelled, trainer
from tests.ranks import run_cases
from tests.refusals import assert_refused

not_resumable = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")


def lognormal(size: int, seed: int = 0) -> Tensor:
    """Lengths as those of texts."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul(0.8).add(4).exp().long() + 1


class Numbered(Dataset[Any]):
    """Learnable samples that know their number."""

    def __init__(self, size: int) -> None:
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        return self.x[number], int(self.x[number, 0] > 0), number


class Recorder(PlainNet):
    """Knows which samples each step had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, list[int]]] = []  # epoch, batch and samples
        self.fails_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("the power is gone")
        self.seen.append((self.current_epoch, batch_idx, batch[2].tolist()))
        return super().training_step(batch[:2], batch_idx)

    validation_step: Any = None


def loader(size: int = 44, batch_size: int = 4, num_workers: int = 0, **settings: Any) -> DataLoader[Any]:
    sampler = lt.LengthBuckets(lognormal(size), batch_size, **{"pool": 3, **settings})
    return DataLoader(Numbered(size), batch_size, sampler=sampler, num_workers=num_workers)


def padding(lengths: Tensor, batches: Any) -> float:
    """The padded part of all batches."""
    kept = sum(int(lengths[batch].sum()) for batch in batches)
    return 1 - kept / sum(len(batch) * int(lengths[batch].max()) for batch in batches)


# -- one process ------------------------------------------------------------------------------------------------------


def naive_steps(lengths: list[int], order: list[int], step: int, pool: int) -> list[list[int]]:
    """Of an order that is as long as all steps; a pool is filled up behind the samples that wait."""
    steps: list[list[int]] = []
    held: list[int] = []
    waits = step * -(-pool // 10) if pool > 1 else 0
    while order or held:
        take = step * pool - waits
        held, order = sorted([*held, *order[:take]], key=lambda number: lengths[number]), order[take:]
        while len(held) > (waits if order else 0):
            steps.append(held[:step])
            held = held[step:]
    return steps


@pytest.mark.parametrize(
    ("size", "step", "pool"), [(1, 4, 2), (7, 1, 1), (12, 4, 2), (95, 4, 3), (99, 2, 20), (45, 8, 50), (3, 8, 1)]
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_steps_are_those_of_the_naive_form(size: int, step: int, pool: int, drop_last: bool) -> None:
    lengths = lognormal(size)
    found = sorted_steps(lengths, step, pool=pool, drop_last=drop_last, generator=None)
    count = size // step if drop_last else -(-size // step)
    order = [number % size for number in range(count * step)]
    assert [each.tolist() for each in found] == naive_steps(lengths.tolist(), order, step, pool)
    shuffled = sorted_steps(lengths, step, pool=pool, drop_last=drop_last, generator=torch.Generator().manual_seed(1))
    assert [len(each) for each in shuffled] == [step] * count
    seen = {number for each in shuffled for number in each.tolist()}
    assert len(seen) == (count * step if drop_last else size)


def waiting(lengths: Tensor, batches: Any) -> float:
    """The part of the time, in tokens, in which one of two ranks waits for the other."""
    longest = torch.tensor([int(lengths[batch].max()) for batch in batches]).reshape(-1, 2)
    return 1 - float(longest.sum() / (2 * longest.amax(1).sum()))


def test_little_is_padding_and_no_rank_waits_for_another() -> None:
    lengths = lognormal(20_000)
    shuffled = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).split(16)
    sampler = lt.LengthBuckets(lengths, 16)
    both = sampler.batches_of_ranks(0, 2)
    assert padding(lengths, both) < 0.1 < 0.6 < padding(lengths, shuffled)
    assert waiting(lengths, both) < 0.01 < 0.1 < waiting(lengths, shuffled)
    samples: Any = lengths
    expected = [lengths[batch].tolist() for batch in sampler.batches_of_ranks(0, 1)]
    assert [batch.tolist() for batch in DataLoader(samples, 16, sampler=sampler)] == expected


def test_the_order_is_of_seed_and_epoch() -> None:
    def order(epoch: int, **settings: Any) -> list[int]:
        sampler: Any = loader(**settings).sampler
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0) == order(0) != order(1) != order(0, seed=7)
    assert order(0, shuffle=False) == order(5, shuffle=False)


def test_a_fit_has_every_sample_once_an_epoch_and_another_order_in_each() -> None:
    module = Recorder()
    trainer(max_epochs=3).fit(module, loader())
    epochs = [[n for epoch, _, batch in module.seen for n in batch if epoch == number] for number in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(44))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_wrong_values_are_refused() -> None:
    cases = [
        (ValueError, {"lengths": [], "batch_size": 2}, "lengths must be a sequence"),
        (ValueError, {"lengths": [[1], [2]], "batch_size": 2}, "lengths must be a sequence"),
        (ValueError, {"lengths": [1, -1], "batch_size": 2}, "must not be negative, got -1"),
        (ValueError, {"lengths": [1, 2], "batch_size": 0}, "batch_size must be at least 1"),
        (ValueError, {"lengths": [1, 2], "batch_size": 1, "pool": 0}, "pool must be at least 1"),
        (ValueError, {"lengths": [1, 2], "batch_size": 1, "seed": -1}, "seed must be at least 0"),
    ]
    assert_refused(lt.LengthBuckets, cases)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint64"])
def test_lengths_may_be_integers_of_any_kind(dtype: str) -> None:
    lengths: Any = np.array([9, 1, 8, 2], dtype)
    assert list(lt.LengthBuckets(lengths, 2, shuffle=False)) == [1, 3, 2, 0]
    assert list(lt.TokenBuckets(torch.from_numpy(lengths), 18, shuffle=False)) == [[0, 2], [3, 1]]


@pytest.mark.parametrize("lengths", [[1.5, 2], ["a"], None, 3.0, torch.ones(2)])
def test_what_is_no_number_of_tokens_is_refused(lengths: Any) -> None:
    with pytest.raises(TypeError, match="lengths must be integers"):
        lt.LengthBuckets(lengths, 2)


class MapWithoutLength(Dataset[Any]):
    def __getitem__(self, number: int) -> Any:
        return Numbered(44)[number]


def test_another_batch_size_and_another_data_set_are_refused() -> None:
    other = DataLoader(Numbered(44), 8, sampler=lt.LengthBuckets(lognormal(44), 4))
    with pytest.raises(ValueError, match=r"LengthBuckets\(batch_size=4\) is in a DataLoader with batches of 8"):
        trainer().fit(Recorder(), other)
    whole = DataLoader(Numbered(44), batch_sampler=lt.LengthBuckets(lognormal(44), 4))
    with pytest.raises(
        ValueError, match=(told := r"not batches, .* DataLoader\(dataset, batch_size=4, sampler=\.\.\.\)\.")
    ):
        list(whole)
    with pytest.raises(ValueError, match=told):
        trainer().fit(Recorder(), whole)
    fewer = DataLoader(Numbered(45), 4, sampler=lt.LengthBuckets(lognormal(44), 4))
    with pytest.raises(ValueError, match="got 44 lengths and 45 samples"):
        trainer().fit(Recorder(), fewer)
    nameless: Any = MapWithoutLength()
    unknown = DataLoader(nameless, 4, sampler=lt.LengthBuckets(lognormal(44), 4))
    with pytest.raises(TypeError, match=r"LengthBuckets needs a data set .*, got MapWithoutLength .*give it a __len__"):
        trainer().fit(Recorder(), unknown)
    with pytest.raises(ValueError, match="no callback that changes it"):
        trainer(callbacks=[lt.BatchSizeWarmup(initial=2, final=4, grow="loader")]).fit(Recorder(), loader())


# -- resume -----------------------------------------------------------------------------------------------------------


class Validated(Recorder):
    """Is also validated, so that there are more places to save in."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Saver(Callback):
    """Saves in hooks from which Lightning can resume, with the number of steps that were made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[str, int] = {}

    def _save(self, run: Any, hook: str) -> None:
        name = f"{hook}-{run.current_epoch}-{run.global_step}"
        self.saved[name] = len(run.lightning_module.seen)
        run.save_checkpoint(self.folder / name)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "batch_end")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "validation_end")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "epoch_end")


def unbroken(folder: Path, **settings: Any) -> tuple[Recorder, dict[str, int]]:
    module, saver = Validated(), Saver(folder)
    trainer(max_epochs=3, callbacks=[saver], val_check_interval=5, **settings).fit(module, loader(), loader(8))
    return module, saver.saved


def resumed(path: Path, train: Any, kind: type[Recorder] = Validated) -> list[Any]:
    module = kind()
    trainer(max_epochs=3, val_check_interval=5).fit(module, train, loader(8), ckpt_path=path)
    return module.seen


@not_resumable
def test_a_resumed_fit_goes_on_with_the_samples_of_an_unbroken_one(tmp_path: Path) -> None:
    module, saved = unbroken(tmp_path)
    assert len(module.seen) == 33
    assert {name.split("-")[0] for name in saved} == {"batch_end", "validation_end", "epoch_end"}
    for name, steps in saved.items():
        if "batch_end" not in name or steps % 3 == 2:  # the last batch of an epoch, 11, among them
            assert resumed(tmp_path / name, loader()) == module.seen[steps:], name


@pytest.mark.few(1)
@not_resumable
@pytest.mark.parametrize("hook", ["batch_end-1-16", "epoch_end-0-11"])
def test_so_it_does_with_workers_which_lightning_starts_early(hook: str, tmp_path: Path) -> None:
    module, saved = unbroken(tmp_path)
    assert resumed(tmp_path / hook, loader(num_workers=2)) == module.seen[saved[hook] :]


@not_resumable
@pytest.mark.slow
def test_so_it_does_with_workers_wherever_it_was_saved(tmp_path: Path) -> None:
    module, saved = unbroken(tmp_path)
    for name, steps in saved.items():
        assert resumed(tmp_path / name, loader(num_workers=1)) == module.seen[steps:], name


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_fit_of_max_steps_goes_on_behind_its_first_epoch(num_workers: int, tmp_path: Path) -> None:
    """Lightning (2.6) counts one epoch too many there."""
    settings, saver = {"max_epochs": -1, "max_steps": 13}, Saver(tmp_path)
    module, again = Validated(), Validated()
    trainer(**settings, callbacks=[saver]).fit(module, loader(), loader(8))
    trainer(**settings).fit(again, loader(num_workers=num_workers), loader(8), ckpt_path=tmp_path / "epoch_end-0-11")
    assert again.seen == module.seen[11:]


@pytest.mark.few(1)
@not_resumable
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_fit_that_failed_goes_on_with_the_step_that_failed(num_workers: int, tmp_path: Path) -> None:
    module, broken = Recorder(), Recorder()
    trainer(max_epochs=3).fit(module, loader())
    broken.fails_at = 15
    saves = ModelCheckpoint(tmp_path / "failed", every_n_epochs=9, save_on_exception=True)
    with pytest.raises(RuntimeError, match="the power is gone"):
        trainer(max_epochs=3, enable_checkpointing=True, callbacks=[saves]).fit(broken, loader(num_workers=num_workers))
    (path,) = (tmp_path / "failed").iterdir()
    assert broken.seen + resumed(path, loader(num_workers=num_workers)) == module.seen


def test_a_second_fit_after_a_failed_one_begins_its_epoch() -> None:
    module, run = Recorder(), trainer(max_epochs=2)
    module.fails_at = 5
    with pytest.raises(RuntimeError, match="the power is gone"):
        run.fit(module, loader(num_workers=1))
    module.fails_at, module.seen = None, []
    run.fit(module, loader(num_workers=1))
    assert sorted(n for epoch, _, batch in module.seen for n in batch if epoch == 0) == list(range(44))


def test_a_second_fit_goes_on_with_the_next_epoch_with_workers_too() -> None:
    module, again, run = Recorder(), Recorder(), trainer(max_epochs=2)
    trainer(max_epochs=2).fit(module, loader())
    run.fit_loop.max_epochs = 1
    run.fit(again, loader())
    run.fit_loop.max_epochs = 2
    run.fit(again, loader(num_workers=1))
    assert again.seen == module.seen


def test_a_shorter_loader_that_is_cycled_begins_anew() -> None:
    class Both(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[0], batch_idx)

    module = Both()
    trainer(max_epochs=1).fit(module, CombinedLoader([loader(8), loader(20)], "max_size_cycle"))
    assert [batch for _, _, batch in module.seen][:2] == [batch for _, _, batch in module.seen][2:4]


def test_another_pass_over_the_samples_within_a_fit_is_complete() -> None:
    class Counts(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            assert trainer.train_dataloader is not None
            assert sum(len(batch[2]) for batch in trainer.train_dataloader) == 44

    trainer(max_epochs=1, callbacks=[Counts()]).fit(Recorder(), loader())


# -- resume with other settings ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of a fit."""
    folder = tmp_path_factory.mktemp("saved")
    unbroken(folder)
    return folder


@not_resumable
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"seed": 1}, "seed was 0, now 1"),
        ({"pool": 2}, "pool was 3, now 2"),
        ({"batch_size": 2, "pool": 6}, "batch_size was 4, now 2; pool was 3, now 6"),
        ({"shuffle": False}, "shuffle was True, now False"),
        ({"drop_last": True}, "drop_last was False, now True"),
        ({"lengths": lognormal(44, seed=1)}, r"checksum of the lengths was '\w+', now '\w+'"),
    ],
    ids=spelled,
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_within_an_epoch_another_order_is_refused_by_name(
    num_workers: int, settings: dict[str, Any], told: str, saved: Path
) -> None:
    given = {"lengths": lognormal(44), "batch_size": 4, "pool": 3, **settings}
    sampler, module = lt.LengthBuckets(**given), Validated()
    train = DataLoader(Numbered(44), sampler.batch_size, sampler=sampler, num_workers=num_workers)
    with pytest.raises(MisconfigurationException, match=f"LengthBuckets resumes within an epoch .*{told}: .* never"):
        trainer(max_epochs=3, val_check_interval=5).fit(module, train, loader(8), ckpt_path=saved / "batch_end-1-16")
    assert not module.seen


class Early(Validated):
    """Has its loaders made, and their workers started, before a checkpoint is restored."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 33
        return super().configure_optimizers()


@pytest.mark.few(1)
@not_resumable
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_fit_has_loaders_made_anew_that_were_made_before_it_was_restored(
    workers: int, tmp_path: Path
) -> None:
    module, _ = unbroken(tmp_path)
    for hook, steps in (("batch_end-1-16", 16), ("epoch_end-0-11", 11)):
        assert resumed(tmp_path / hook, loader(num_workers=workers), Early) == module.seen[steps:]


def test_at_an_epochs_end_another_order_is_as_good(saved: Path) -> None:
    seen = resumed(saved / "epoch_end-0-11", loader(seed=1))
    assert sorted(n for epoch, _, batch in seen for n in batch if epoch == 1) == list(range(44))


@not_resumable
def test_within_an_epoch_of_another_loader_it_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    plain = DataLoader(Numbered(44), 4)
    trainer(max_epochs=3, val_check_interval=5, callbacks=[Saver(tmp_path)]).fit(Validated(), plain, loader(8))
    for kind in (Validated, Early):
        with pytest.raises(MisconfigurationException, match=r"that another sampler began: .* never"):
            resumed(tmp_path / "batch_end-1-16", loader(), kind)
    assert len(resumed(saved / "batch_end-1-16", plain)) == 17  # of which Lightning warns


@not_resumable
def test_each_of_several_loaders_has_an_order_of_its_own(tmp_path: Path) -> None:
    class Both(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[self.global_step % 2], batch_idx)

    def fit(*seeds: int, ckpt_path: Path | None = None) -> Any:
        module, train = Both(), CombinedLoader([loader(seed=seed) for seed in seeds], "max_size_cycle")
        trainer(max_epochs=1, callbacks=[Saver(tmp_path)]).fit(module, train, ckpt_path=ckpt_path)
        return module.seen

    whole, path = fit(1, 2), tmp_path / "batch_end-0-6"
    assert fit(1, 2, ckpt_path=path) == whole[6:]
    with pytest.raises(MisconfigurationException, match="seed was 2, now 3"):
        fit(1, 3, ckpt_path=path)


# -- several ranks ----------------------------------------------------------------------------------------------------


def on_ranks(case: str, folder: Path) -> Any:
    settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 2}
    module, again, train = Recorder(), Recorder(), loader(45, drop_last=case == "drop")
    if case == "drop":
        run = trainer(**settings, use_distributed_sampler=False)
        run.fit(module, train)
    else:
        saver = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        run = trainer(**settings, enable_checkpointing=True, callbacks=[saver])
        run.fit(module, train)
        trainer(**settings).fit(again, train, ckpt_path=folder / "step=8.ckpt")
        assert again.seen == module.seen[8:]
    return module.seen, [len(train), run.num_training_batches]


@not_resumable
def test_the_ranks_share_the_samples_of_a_step_also_of_a_resumed_epoch(tmp_path: Path) -> None:
    cases = run_cases(partial(on_ranks, folder=tmp_path), ["pad", "drop"])
    lengths = lognormal(45)
    for case, batches in (("pad", 6), ("drop", 5)):
        (first, told), (second, _) = cases[case]
        assert told == [batches, batches]
        assert len(first) == len(second) == 2 * batches
        for epoch in (0, 1):
            seen = [n for number, _, batch in (*first, *second) for n in batch if number == epoch]
            assert len(seen) == 8 * batches
            assert len(set(seen)) == (40 if case == "drop" else 45)
        for (_, _, one), (_, _, other) in zip(first, second, strict=True):
            together = sorted(lengths[one + other].tolist())
            assert sorted(lengths[one].tolist()) == together[::2]
            assert sorted(lengths[other].tolist()) == together[1::2]
    with pytest.raises(MisconfigurationException, match="ranks was 2, now 1: "):
        trainer(max_epochs=2).fit(Recorder(), loader(45), ckpt_path=tmp_path / "step=8.ckpt")
