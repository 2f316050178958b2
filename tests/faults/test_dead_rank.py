"""One of two ranks dies: the other ends with an error, what is on disk is whole, and a new start goes on exactly."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt
from lightning_tricks.core.safe_load.damage import unfinished
from tests.faults import everything
from tests.faults.runs import Resumable, load, train
from tests.nets import assert_equal, trainer, weights
from tests.ranks import _environment, _free_port, _receive, _start, run_ranks

TIMEOUT = timedelta(seconds=60)  # of the ranks for one another
BOUND = 180  # s until the rank that is left has ended


class Dies(Callback):
    """Ends this process in a hook at a step, as the kernel does that has run out of memory."""

    def __init__(self, hook: str, step: int) -> None:
        self.hook, self.step = hook, step
        setattr(self, hook, self.die)

    def die(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def strategy(engine: str) -> dict[str, Any]:
    backend = {"process_group_backend": "gloo"} if engine == "ddp_bf16" else {}
    return lt.preset(engine, precision="32-true", timeout=TIMEOUT, **backend)


def fit(folder: str, engine: str, ckpt_path: Any = None, hook: str = "", step: int = 0, dying: int = -1) -> Any:
    """Weights and averages at the end of a training with everything, on the ranks' own batches."""
    rank, module = int(os.environ["RANK"]), everything.fresh()
    kept: list[L.Trainer] = []

    def trained(ckpt_path: Any, *, callbacks: tuple[Callback, ...], **settings: Any) -> L.Trainer:
        first = [Dies(hook, step)] if rank == dying else [Callback()]
        made = trainer(
            **{"max_epochs": everything.EPOCHS, "devices": 2, **settings},
            callbacks=[*first, lt.Preemption(folder), *everything.tricks(), *callbacks],
        )
        everything.run(made, module, Resumable(seed=5 + rank), ckpt_path=ckpt_path)
        kept.append(made)
        return made

    train(Path(folder), ckpt_path, trained=trained, **strategy(engine))
    averages = [each for each in kept[0].callbacks if isinstance(each, lt.EMA | lt.SWA)]  # type: ignore[attr-defined]
    return [weights(module), *(each.averaged_state_dict() for each in averages)]


def fit_and_die(folder: str, engine: str, hook: str, step: int, dying: int) -> str:
    """What the rank that is left says."""
    args, port = (folder, engine, None, hook, step, dying), _free_port()
    ranks = [_start(fit, args, _environment(rank, 2, port)) for rank in range(2)]
    (dead, _), (left, receiver) = ranks[dying], ranks[1 - dying]
    try:
        dead.join(BOUND)
        assert dead.exitcode == -signal.SIGKILL
        ended, said = _receive(left, receiver, time.monotonic() + BOUND)
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    assert not ended
    return said


@cache
def marked_busy(engine: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(fit, folder, engine)


CASES = [
    (engine, hook, step, dying)
    for engine in ("ddp_bf16", "fsdp2_bf16")
    for hook, step in (("on_before_backward", 9), ("on_validation_batch_end", 6), ("on_save_checkpoint", 9))
    for dying in (0, 1)
]
QUICK = ("ddp_bf16", "on_before_backward", 9, 1)


@pytest.mark.parametrize(
    ("engine", "hook", "step", "dying"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_rank_that_dies(engine: str, hook: str, step: int, dying: int, tmp_path: Path) -> None:
    said = fit_and_die(str(tmp_path), engine, hook, step, dying)
    assert "RuntimeError" in said  # torch's own, which no trick hides behind another
    assert "gloo" in said
    assert "During handling" not in said
    paths = [path for path in tmp_path.iterdir() if path.name[0] != "."]
    assert len(paths) >= step
    for path in paths:
        assert not path.is_dir() or unfinished(path) is None
        load(path / "meta.pt" if path.is_dir() else path)
    for ended, expected in zip(run_ranks(fit, str(tmp_path), engine, "newest"), marked_busy(engine), strict=True):
        for mine, others in zip(ended, expected, strict=True):
            assert_equal(mine, others)
