"""Checkpoints of split layers: resumed exactly, in other layouts too, and made one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from lightning_tricks.checkpoints.consolidate import consolidate
from lightning_tricks.core.ranks import sample_group
from lightning_tricks.core.weights.fsdp2 import local_part
from tests.nets import SaveAt, assert_close, assert_equal, build, fit, loader, trainer, weights
from tests.ranks import run_ranks
from tests.strategies.fsdp2.split_nets import ATTENTION, HAND, HEAD, Words, alone, batches, together
from tests.strategies.sharded import evaluated, whole

pytestmark = pytest.mark.slow  # test_tensor_parallel.py has a quick form

PLANNED = {"plan": HAND}
LAYOUTS: dict[str, dict[str, Any]] = {  # of four processes
    "2 x 2": PLANNED,
    "4 x 1": {"tensor_parallel": 1},
    "1 x 4, without MLP": {"tensor_parallel": 4, "plan": {**ATTENTION, **HEAD}},
}


class Fails(Words):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2:
            raise RuntimeError("planned")
        return loss


class Distance(Callback):
    """The logged distance of the averages, and that of the gathered weights."""

    def __init__(self, ema: lt.EMA) -> None:
        self.ema = ema

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        averages = self.ema._running
        states = averages.weights.state(), self.ema.averaged_state_dict()
        raw, averaged = (torch.cat([state[name].flatten() for name in averages.tensors]) for state in states)
        self.found = averages.distance(trainer.strategy.root_device), float((raw - averaged).norm() / raw.norm())


def resumed(folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Saves after an epoch, resumes, and looks at averages, parts of full tensors and an evaluation."""
    emas = [lt.EMA(0.9, at_end="raw") for _ in range(2)]
    path, distance = f"{folder}/first", Distance(emas[0])
    first, _ = together(Words, arguments, callbacks=[emas[0], SaveAt(path, epoch=0), distance], max_epochs=3)
    again, _ = together(Words, arguments, callbacks=[emas[1]], max_epochs=3, ckpt_path=path)
    assert_equal(whole(again), whole(first))
    assert_equal(emas[0].averaged_state_dict(), emas[1].averaged_state_dict())
    for parameter in again.parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(local_part(parameter.full_tensor(), parameter), parameter.to_local())
    trained, run = together(Words, arguments, max_epochs=1)
    run.save_checkpoint(f"{folder}/end")
    fresh = trainer(devices=int(os.environ["LOCAL_WORLD_SIZE"]), use_distributed_sampler=False, **preset(arguments))
    ended, loaded = evaluated(run, trained), evaluated(fresh, build(Words, lr=1.0), f"{folder}/end")
    assert loaded["scores"] == ended["scores"]
    assert torch.equal(loaded["predicted"], ended["predicted"])
    return {"weights": whole(again), "saved": whole(trained), "distance": distance.found}


def preset(arguments: dict[str, Any]) -> dict[str, Any]:
    return lt.preset("tp_bf16", **{"tensor_parallel": 2, "precision": "32-true", **arguments})


def on_two(folder: str) -> dict[str, Any]:
    found = resumed(folder, PLANNED)
    module, _ = together(Words, PLANNED)
    fit(module, train=batches(2), devices=2, use_distributed_sampler=False, **preset(PLANNED))
    found["second"] = whole(module)
    with pytest.raises(RuntimeError, match="planned"):
        together(Fails, {**PLANNED, "activation_checkpointing": True})
    assert sample_group() is dist.group.WORLD
    found["after a failure"] = whole(together(Words, PLANNED)[0])
    with pytest.raises(MisconfigurationException, match=r"still split among 2 processes.*got tensor_parallel=1"):
        fit(module, **{"devices": 2, **lt.preset("fsdp2_bf16", precision="32-true")})
    return found


def on_four(folder: str) -> dict[str, Any]:
    files, folders = f"{folder}/files", f"{folder}/folders"
    found = {"folder": resumed(folders, PLANNED), "file": resumed(files, {**PLANNED, **ONE_FILE})}
    found["offload"] = resumed(f"{folder}/offload", {**PLANNED, "offload": True})
    for name, arguments in LAYOUTS.items():
        for path, more in ((folders, {}), (files, ONE_FILE)):
            module, _ = together(Words, {**arguments, **more}, ckpt_path=f"{path}/end", max_epochs=2)
            found[f"{name} {Path(path).name}"] = whole(module)
    dist.barrier()
    return found


ONE_FILE = {"save_distributed_checkpoint": False}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(on_two, str(folder))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("four")
    return folder, run_ranks(on_four, str(folder), nprocs=4)


def test_a_resumed_fit_is_exact_and_trains_what_one_process_does(two: tuple[Path, list[dict[str, Any]]]) -> None:
    module, _ = alone(Words, max_epochs=3)
    for rank in two[1]:
        assert_close(rank["weights"], weights(module), 1e-5)


def test_a_second_fit_goes_on(two: tuple[Path, list[dict[str, Any]]]) -> None:
    module, _ = alone(Words)
    fit(module, train=loader(48, 16))
    for rank in two[1]:
        assert_close(rank["second"], weights(module), 1e-5)


def test_a_fit_that_fails_leaves_nothing_behind(two: tuple[Path, list[dict[str, Any]]]) -> None:
    module, _ = alone(Words)
    for rank in two[1]:
        assert_close(rank["after a failure"], weights(module), 1e-5)


def test_the_distance_counts_each_part_once(two: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in two[1]:
        assert rank["distance"][0] == pytest.approx(rank["distance"][1], rel=1e-4)


def test_a_folder_becomes_one_file_of_the_plain_module(two: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    consolidate(two[0] / "end", tmp_path / "one.pt")
    module = build(Words)
    module.load_state_dict(torch.load(tmp_path / "one.pt"))
    assert_equal(weights(module), two[1][0]["saved"])


def test_four_processes_resume_as_two(four: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    module, _ = alone(Words, max_epochs=3)
    folder, ranks = four
    for rank in ranks:
        for kind in ("folder", "file", "offload"):
            assert_close(rank[kind]["weights"], weights(module), 1e-5)
            assert rank[kind]["distance"][0] == pytest.approx(rank[kind]["distance"][1], rel=1e-4)
    consolidate(folder / "folders" / "end", tmp_path / "one.pt")
    assert_equal(torch.load(tmp_path / "one.pt"), ranks[0]["folder"]["saved"])
    assert_equal(torch.load(folder / "files" / "end")["state_dict"], ranks[0]["file"]["saved"])


def test_other_layouts_resume_from_both_kinds_of_checkpoints(four: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in four[1]:
        for name in LAYOUTS:
            for kind in ("files", "folders"):
                assert_close(rank[f"{name} {kind}"], rank["2 x 2 folders"], 1e-5)
