"""Sixty-four ranks on eight nodes, all of them this machine: what holds for two must hold for many."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from lightning_tricks.checkpoints.consolidate import consolidate
from lightning_tricks.evaluation.plan import locked
from tests.nets import PlainNet, assert_close, assert_equal, build, data, fit, weights
from tests.ranks import run_alone, run_cases

pytestmark = pytest.mark.slow
RANKS, NODES = 64, 8
SAMPLES, BATCH, EPOCHS = 2 * RANKS * 3 - 5, 2, 2  # not a multiple of the ranks
STEPS = 3  # of an epoch


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples with their numbers."""

    def __init__(self) -> None:
        self.samples = data(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return *self.samples[number], number


class Reading(PlainNet):
    """Remembers the numbers of an epoch's samples, and the learning rate of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[int]] = []
        self.rates: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.read.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = batch
        self.read[-1] += numbers.tolist()
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step((x, y), batch_idx)

    def configure_optimizers(self) -> Any:
        return lt.flat_cos(torch.optim.SGD(self.parameters(), lr=0.1), self, warmup=2)


def loader_of(kind: str) -> DataLoader[Any]:
    samples = Numbered()
    if kind == "weighted":
        sampler = lt.DistributedWeightedSampler([1.0 + n % 3 for n in range(SAMPLES)], replacement=False)
        return DataLoader(samples, BATCH, sampler=sampler)
    if kind == "buckets":
        lengths = [1 + n % 7 for n in range(SAMPLES)]
        return DataLoader(samples, BATCH, sampler=lt.LengthBuckets(lengths, BATCH))
    return DataLoader(samples, BATCH, shuffle=True)


def trained(case: str, folder: str) -> dict[str, Any]:
    """What this rank read and has after a fit: by the sampler's name under DDP, or by the preset's."""
    preset = case if "_" in case else "ddp_bf16"
    module, ema = build(Reading), lt.EMA(decay=0.5)
    settings = {"devices": RANKS // NODES, "num_nodes": NODES, "strategy": preset, "max_epochs": EPOCHS}
    run = fit(module, train=loader_of(case), val=[], callbacks=[ema], **settings)
    found = {
        "read": module.read,
        "rates": module.rates,
        "steps": run.global_step,
        "averaged": ema.averaged_state_dict(),
    }
    found["weights"], found["rank"] = weights(module), (run.node_rank, run.local_rank, run.global_rank)
    if preset != case:
        return found
    run.save_checkpoint(f"{folder}/{case}.ckpt")
    again = build(Reading)
    run = fit(again, train=loader_of(case), val=[], ckpt_path=f"{folder}/{case}.ckpt", **{**settings, "max_epochs": 3})
    return {**found, "resumed": (run.global_step, again.rates)}


SAMPLERS = ["lightning", "weighted", "buckets"]
SHARDED = ["fsdp2_bf16", "hsdp_bf16"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("many")
    return folder, run_cases(trained, [*SAMPLERS, *SHARDED], str(folder), nprocs=RANKS, nodes=NODES, timeout=900)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_rank_reads_its_own_part_of_every_epoch(ranks: tuple[Path, Any], sampler: str) -> None:
    found = ranks[1][sampler]
    assert [rank["rank"] for rank in found] == [(*divmod(n, RANKS // NODES), n) for n in range(RANKS)]
    for epoch in range(EPOCHS):
        read = [number for rank in found for number in rank["read"][epoch]]
        assert set(read) == set(range(SAMPLES))
        assert len(read) - SAMPLES < RANKS * BATCH  # only what fills the last step comes twice
    assert found[0]["read"][0] != found[0]["read"][1], "another order in every epoch"


@pytest.mark.parametrize("case", [*SAMPLERS, *SHARDED])
def test_steps_rates_weights_and_averages_are_those_of_one_training(ranks: tuple[Path, Any], case: str) -> None:
    first, *others = ranks[1][case]
    assert first["steps"] == STEPS * EPOCHS == len(first["rates"])
    assert first["rates"][0] < first["rates"][2] == max(first["rates"]), "two steps of warm-up"
    assert 0 < first["rates"][-1] < first["rates"][2]
    for rank in others:
        assert rank["rates"] == first["rates"]
        assert_equal(rank["weights"], first["weights"])
        if rank["averaged"]:  # of shards the first rank alone gathers
            assert_equal(rank["averaged"], first["averaged"])


@pytest.mark.parametrize("preset", SHARDED)
def test_a_folder_has_a_file_of_every_rank_and_goes_on(ranks: tuple[Path, Any], preset: str, tmp_path: Path) -> None:
    folder, found = ranks[0] / f"{preset}.ckpt", ranks[1][preset]
    loaded = torch.load(consolidate(folder, tmp_path / "whole.pt"))
    assert_close(loaded, found[0]["averaged"], 0.0)
    shards = {int(file.name.split("_")[2]) for file in folder.glob("__*.distcp")}
    assert shards == set(range(RANKS))
    for rank in found:
        steps, rates = rank["resumed"]
        assert (steps, len(rates)) == (STEPS * 3, STEPS)


def hold(folder: str) -> str:
    """Train in the folder until all others have been refused."""
    try:
        with locked(Path(folder)):
            deadline = time.monotonic() + 120
            while len(list(Path(folder).glob("refused-*"))) < RANKS - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            return "held"
    except ValueError as error:
        Path(folder, f"refused-{os.getpid()}").touch()
        return str(error)


def test_one_of_many_runs_gets_the_lock(tmp_path: Path) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        told = list(pool.map(lambda _: run_alone(hold, str(tmp_path)), range(RANKS)))
    assert told.count("held") == 1
    assert len([text for text in told if "trains in" in text]) == RANKS - 1
