"""Averages in checkpoints that are folders: found again by other numbers of ranks, and never taken for others."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from lightning_tricks.core.weights.by_engine import local_weights
from tests.core.weights.test_local import ShardedNet, fsdp2, train
from tests.nets import NormNet, assert_equal, build, fit, loader, rank_loader
from tests.ranks import run_ranks

SHARDS = Path("averages", "EMA(decay=0.9)")


def save(engine: str, folder: str) -> dict[str, Any]:
    ema = lt.EMA(0.9)
    train(engine, ema)[1].save_checkpoint(f"{folder}/x.ckpt")
    return {name: value.numpy() for name, value in ema.averaged_state_dict().items()}


def load_alone(folder: str) -> dict[str, Any]:
    ema = lt.EMA(0.9)
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    fit(build(ShardedNet), callbacks=[ema], strategy=strategy, ckpt_path=f"{folder}/x.ckpt", train=loader(24))
    return {name: value.numpy() for name, value in ema.averaged_state_dict().items()}


def test_fsdp2_shards_are_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    saved, _ = run_ranks(save, "fsdp2", str(tmp_path))
    (loaded,) = run_ranks(load_alone, str(tmp_path), nprocs=1)
    assert saved.keys() == loaded.keys()
    assert all((saved[name] == loaded[name]).all() for name in saved)


class Frozen(ShardedNet):
    """Its first layer trains no more."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # with the frozen ones, as in the checkpoint


class AtStart(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = local_weights(trainer, pl_module, "AtStart").state()


def frozen_later(folder: str) -> None:
    module, run = train("fsdp2", lt.EMA(0.9, at_end="raw"))
    raw = local_weights(run, module, "test").state()
    run.save_checkpoint(f"{folder}/x.ckpt")
    start, settings = AtStart(), {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False, **fsdp2()}
    fit(build(Frozen), callbacks=[lt.EMA(0.9), start], max_epochs=3, ckpt_path=f"{folder}/x.ckpt", **settings)
    assert_equal(start.weights, raw)


def test_weights_that_are_frozen_by_now_are_the_raw_ones(tmp_path: Path) -> None:
    run_ranks(frozen_later, str(tmp_path))


def another_kind(folder: str) -> None:
    averages = [lt.EMA(0.99, validate="raw", at_end="raw"), lt.EMA(0.9, at_end="raw")]
    module, run = train("fsdp2", None, callbacks=averages)
    raw = local_weights(run, module, "test").state()
    run.save_checkpoint(f"{folder}/x.ckpt")
    start = AtStart()
    train("fsdp2", lt.SWA(0.5), callbacks=[start], max_epochs=3, ckpt_path=f"{folder}/x.ckpt")
    assert_equal(start.weights, raw)


def test_an_average_of_another_kind_gives_its_raw_shards(tmp_path: Path) -> None:
    run_ranks(another_kind, str(tmp_path))


def damaged(engine: str, folder: str, damage: str) -> str:
    save(engine, folder)
    torch.distributed.barrier()
    shards = Path(folder, "x.ckpt") / SHARDS
    if torch.distributed.get_rank() == 0:
        if damage == "missing":
            shutil.rmtree(shards)
        elif damage == "unfinished":
            (shards / ".metadata").unlink()
        elif damage == "one rank":
            next(shards.glob("__1_*.distcp")).unlink()
        else:  # a save that was killed between the strategy's files and ours, over an older checkpoint
            shutil.copytree(shards, Path(folder, "later"))
    torch.distributed.barrier()
    if damage == "older":
        train(engine, lt.EMA(0.9), max_epochs=3)[1].save_checkpoint(f"{folder}/x.ckpt")
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(shards)
            shutil.copytree(Path(folder, "later"), shards)
        torch.distributed.barrier()
    with pytest.raises(MisconfigurationException) as caught:
        train(engine, lt.EMA(0.9), max_epochs=4, ckpt_path=f"{folder}/x.ckpt")
    return str(caught.value)


WHOLE = [("fsdp2", "missing"), ("zero3", "older")]  # quick ones


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("engine", "damage"),
    [
        case if case in WHOLE else pytest.param(*case, marks=pytest.mark.slow)
        for case in product(("fsdp2", "zero3"), ("missing", "unfinished", "one rank", "older"))
    ],
)
def test_a_folder_that_is_not_whole_is_named(engine: str, damage: str, tmp_path: Path) -> None:
    for message in run_ranks(damaged, engine, str(tmp_path), damage):
        assert "The averages of this checkpoint are in shards in" in message
        assert "Resume from the folder that was saved" in message
        if damage == "older":
            assert "it is from step 6, the checkpoint from step 9" in message


def test_a_checkpoint_is_plain_data_that_loads_safely(tmp_path: Path) -> None:
    ema = lt.EMA(0.9, validate="both")
    fit(build(NormNet), callbacks=[ema]).save_checkpoint(tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["EMA(decay=0.9)"]
    assert state.keys() == {"steps", "updates", "raw", "averaged", "history"}
    assert state["raw"].keys() == {name for name, _ in build(NormNet).named_parameters()}
    assert json.dumps(state["history"])
