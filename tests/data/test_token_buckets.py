"""TokenBuckets: batches within the budget, every sample once an epoch, equal numbers of batches, and resumed epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import lightning_tricks as lt
from lightning_tricks.data.token_buckets import length_bands
from tests.data.test_length_buckets import Numbered, Recorder, lognormal, not_resumable, padding
from tests.nets import trainer
from tests.ranks import run_cases

BUDGET = 800


def loader(size: int = 65, num_workers: int = 0, **settings: Any) -> DataLoader[Any]:
    sampler = lt.TokenBuckets(lengths(size), BUDGET, **settings)
    samples = lt.BatchedDataset(Numbered(size))
    return DataLoader(samples, batch_size=None, sampler=sampler, collate_fn=default_collate, num_workers=num_workers)


def lengths(size: int) -> Tensor:
    return lognormal(size).clamp(max=400)


@pytest.mark.parametrize("size", [1, 2, 17, 1000])
@pytest.mark.parametrize("budget", [400, 1000, 100_000])
def test_any_samples_of_a_band_fit(size: int, budget: int) -> None:
    given = sorted(lengths(size).tolist(), reverse=True)
    bands, start = length_bands(given, budget), 0
    for samples, batch in bands:
        band = given[start : start + samples]
        assert batch * band[0] <= budget < (batch + 1) * band[0]
        assert band[-1] >= 0.9 * band[0] or samples <= batch
        assert start + samples == size or samples % batch == 0
        start += samples
    assert start == size


def test_batches_are_full_and_have_little_padding() -> None:
    found = lognormal(20_000).clamp(max=1000)
    sampler = lt.TokenBuckets(found, 8192)
    batches = sampler.batches_of_ranks(3, 1)
    sizes = torch.tensor([len(batch) * int(found[batch].max()) for batch in batches])
    assert sizes.max() <= 8192
    assert sizes.float().mean() > 0.9 * 8192
    assert padding(found, batches) < 0.1
    assert sorted(torch.cat(batches).tolist()) == list(range(20_000))
    both = torch.tensor([len(batch) * int(found[batch].max()) for batch in sampler.batches_of_ranks(3, 2)]).view(-1, 2)
    assert 1 - both.sum() / (2 * both.amax(1).sum()) < 0.03


def test_epochs_have_other_batches_and_the_same_number_of_them() -> None:
    sampler = lt.TokenBuckets(lengths(5000), BUDGET)
    epochs = [[frozenset(batch.tolist()) for batch in sampler.batches_of_ranks(epoch, 1)] for epoch in range(5)]
    assert {len(epoch) for epoch in epochs} == {len(sampler)}
    assert len({*epochs[0]} & {*epochs[1]}) < len(sampler) / 4


def test_a_fit_has_every_sample_once_an_epoch() -> None:
    module, train = Recorder(), loader()
    trainer(max_epochs=2).fit(module, train)
    assert len(module.seen) == 2 * len(train)
    for epoch in (0, 1):
        assert sorted(n for number, _, batch in module.seen for n in batch if number == epoch) == list(range(65))


@not_resumable
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_fit_goes_on_with_the_batches_of_an_unbroken_one(num_workers: int, tmp_path: Path) -> None:
    module, again, steps = Recorder(), Recorder(), len(loader()) + 3
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer(max_epochs=3, enable_checkpointing=True, callbacks=[saver]).fit(module, loader())
    path = tmp_path / f"step={steps}.ckpt"
    trainer(max_epochs=3).fit(again, loader(num_workers=num_workers), ckpt_path=path)
    assert again.seen == module.seen[steps:]
    train = loader()
    train.sampler.max_tokens += 1
    with pytest.raises(MisconfigurationException, match=r"TokenBuckets .* max_tokens was 800, now 801: "):
        trainer(max_epochs=3).fit(again, train, ckpt_path=path)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match="at least the longest of lengths, 5, got 4"):
        lt.TokenBuckets([1, 5], 4)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        lt.TokenBuckets([1, 5], 0)
    with pytest.raises(TypeError, match="dataset must have __getitem__"):
        lt.BatchedDataset(iter("abc"))


def test_a_loader_that_makes_batches_and_another_data_set_are_refused() -> None:
    with pytest.raises(ValueError, match=r"use\s+DataLoader\(BatchedDataset\(dataset\), batch_size=None"):
        next(iter(DataLoader(Numbered(65), 8, sampler=lt.TokenBuckets(lengths(65), BUDGET))))
    fewer = DataLoader(lt.BatchedDataset(Numbered(66)), batch_size=None, sampler=lt.TokenBuckets(lengths(65), BUDGET))
    with pytest.raises(ValueError, match="got 65 lengths and 66 samples"):
        trainer().fit(Recorder(), fewer)
    with pytest.raises(ValueError, match="got 65 lengths and 66 samples"):
        trainer().fit(Recorder(), DataLoader(Numbered(66), batch_sampler=lt.TokenBuckets(lengths(65), BUDGET)))


# -- several ranks ----------------------------------------------------------------------------------------------------


def on_ranks(case: str) -> Any:
    run, module, train = trainer(devices=2, strategy="ddp"), Recorder(), loader()
    if case == "drop":  # Lightning cannot split a batch sampler, and leaves that to its owner
        run = trainer(devices=2, strategy="ddp", use_distributed_sampler=False)
        train = DataLoader(Numbered(65), batch_sampler=lt.TokenBuckets(lengths(65), BUDGET, drop_last=True))
    run.fit(module, train)
    return module.seen, len(train)


def test_the_ranks_share_the_batches() -> None:
    cases = run_cases(on_ranks, ["pad", "drop"])
    alone = len(lt.TokenBuckets(lengths(65), BUDGET))
    assert alone % 2 == 1, "or nothing would be padded"
    for case, steps in (("pad", (alone + 1) // 2), ("drop", alone // 2)):
        (first, told), (second, other) = cases[case]
        assert told == other == steps
        assert len(first) == len(second) == 2 * steps
        for epoch in (0, 1):
            seen = [n for number, _, batch in (*first, *second) for n in batch if number == epoch]
            assert len(set(seen)) == 65 if case != "drop" else len(set(seen)) == len(seen) < 65
        assert {number for number, _, _ in first} == {0, 1}
        assert [batch for number, _, batch in first if number == 0] != [b for number, _, b in first if number == 1]
