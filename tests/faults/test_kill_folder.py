"""Two ranks killed at any moment while they save under one name again and again: the folder loads, and does not lie."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from lightning_tricks.checkpoints.consolidate import consolidate
from lightning_tricks.core.safe_load.damage import unfinished
from tests.nets import PlainNet, build, rank_loader
from tests.ranks import _environment, _free_port, _start, run_ranks
from tests.strategies.test_atomic_folder import make_trainer

STARTED = 60  # s until a training must have begun to save


class Counting(PlainNet):
    """Its weights are the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(1000, 100)) for _ in range(8))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        return sum(each.sum() for each in self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(engine: str, folder: str, ckpt_path: str | None) -> None:
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (killed ranks would complain to the end)
    path = Path(folder) / "a.ckpt"
    save = LambdaCallback(on_train_batch_end=lambda run, *_: run.save_checkpoint(path))
    make_trainer(engine, save, max_epochs=-1).fit(build(Counting), rank_loader(), ckpt_path=ckpt_path)


def kill(engine: str, folder: Path, delay: float, apart: float, first: int) -> None:
    """Kill both ranks ``delay`` seconds after the first save of this run, the second ``apart`` seconds later."""
    path, port = folder / "a.ckpt", _free_port()
    before = path.stat().st_ino if path.exists() else None
    resumed = str(path) if path.exists() else None
    ranks = [_start(train, (engine, str(folder), resumed), _environment(rank, 2, port)) for rank in range(2)]
    deadline = time.monotonic() + STARTED
    try:
        while not path.exists() or path.stat().st_ino == before:
            assert time.monotonic() < deadline, [r.recv() if r.poll() else p.exitcode for p, r in ranks]
            time.sleep(0.001)
        time.sleep(delay)
        alive = [process.exitcode is None for process, _ in ranks]
    finally:
        for process, _ in (*ranks[first:], *ranks[:first]):
            process.kill()
            time.sleep(apart)
        for process, _ in ranks:
            process.join()
    assert alive == [True, True], [r.recv() if r.poll() else None for _, r in ranks]


def step_of(folder: Path) -> int:
    """The step of the checkpoint, whose weights are of that step."""
    path = folder / "a.ckpt"
    assert unfinished(path) is None
    consolidate(path, folder.parent / "a.pt", force=True)
    states = path / "checkpoint"
    meta = next(states.glob("*model_states.pt")) if states.is_dir() else path / "meta.pt"
    step = torch.load(meta, weights_only=False)["global_step"]
    state = torch.load(folder.parent / "a.pt")
    assert len(state) == 8
    assert all(bool((value == step).all()) for value in state.values())
    return step


def resume(engine: str, folder: str, step: int) -> int:
    """Train one step more than the checkpoint, and save under its name."""
    run, path = make_trainer(engine, max_epochs=-1, max_steps=step + 1), f"{folder}/a.ckpt"
    run.fit(build(Counting), rank_loader(), ckpt_path=path)
    run.save_checkpoint(path)
    return run.global_step


@pytest.mark.parametrize(
    ("engine", "kills", "seed"),
    [
        ("fsdp2", 1, 1),
        ("zero1", 1, 2),
        *(pytest.param(engine, 30, 3, marks=pytest.mark.slow) for engine in ("fsdp2", "zero1", "zero3")),
    ],
)
def test_killed_at_any_moment_the_folder_is_whole(engine: str, kills: int, seed: int, tmp_path: Path) -> None:
    rng, folder, last, left = random.Random(seed), tmp_path / "run", 0, 0
    folder.mkdir()
    for _ in range(kills):
        delay, apart = rng.uniform(0, 0.3), rng.choice([0.0, rng.uniform(0, 0.1)])
        kill(engine, folder, delay, apart, first=rng.randrange(2))
        step = step_of(folder)
        print(f"seed {seed}: killed after {delay:.3f} s, {apart:.3f} s apart, at step {step}; {os.listdir(folder)}")
        assert step > last
        last, others = step, [name for name in os.listdir(folder) if name != "a.ckpt"]
        assert all(name.startswith(".") for name in others)
        left += bool(others)
    assert run_ranks(resume, engine, str(folder), last) == [last + 1] * 2
    assert step_of(folder) == last + 1
    assert os.listdir(folder) == ["a.ckpt"]
    assert kills < 30 or left > 5  # the kills did land where it matters
