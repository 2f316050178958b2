"""Ranks killed under torchrun, which starts them again: training ends with the weights of one that nothing disturbs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nets import assert_equal

ROOT = Path(__file__).parents[2]
TIMEOUT = 120  # s for a start
EPOCHS = 80
RANKS = {"hsdp_bf16": 4, "tp_bf16": 4}  # others have two


def torchrun(
    folder: Path, engine: str, restarts: int, data: str = "resumable", ranks: int = 2
) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    # torch (2.5 to 2.13) restarts ranks with the addresses of the dead ones otherwise, issue 135712.
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, *command, "-m", "tests.faults.elastic", str(folder), engine, str(EPOCHS), data],
            env={**os.environ, **own},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def begun(folder: Path, after: int, process: subprocess.Popen[bytes], ranks: int = 2) -> tuple[int, list[int]]:
    """The next attempt in which all ranks have begun a fit, and their processes; one may fail before that."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        for attempt in range(after + 1, after + 5):
            lines = [told(folder, attempt, rank) for rank in range(ranks)]
            if all(lines):
                return attempt, [int(each[0]) for each in lines]
        time.sleep(0.005)


def told(folder: Path, attempt: int, rank: int) -> list[str]:
    file = folder / f"{attempt}-{rank}"
    return file.read_text().splitlines() if file.exists() else []


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait until something is so, or for ten seconds."""
    deadline = time.monotonic() + 10
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.001)


def final(folder: Path, process: subprocess.Popen[bytes], ranks: int = 2) -> list[Any]:
    """What the ranks have at the end."""
    process.wait(timeout=300)
    assert process.returncode == 0, (folder / "log").read_text()
    return [torch.load(folder / f"final-{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the ranks have at the end of a training that nothing disturbs, by preset."""

    @cache
    def trained(engine: str, data: str = "resumable") -> list[Any]:
        folder, engine = tmp_path_factory.mktemp("undisturbed") / "run", engine.removesuffix("+async")
        return final(folder, torchrun(folder, engine, 0, data, RANKS.get(engine, 2)), RANKS.get(engine, 2))

    return trained


def check_final(folder: Path, process: subprocess.Popen[bytes], expected: list[Any]) -> None:
    for (mine, step), (others, last) in zip(final(folder, process, len(expected)), expected, strict=True):
        assert_equal(mine, others)
        assert step == last == 6 * EPOCHS


@pytest.mark.slow
@pytest.mark.parametrize("data", ["resumable", "shuffled"])
@pytest.mark.parametrize(
    ("engine", "kills", "seed"),
    [
        *(("ddp_bf16", 20, 1), ("fsdp2_bf16", 20, 2), ("zero1_bf16", 5, 3)),
        *(("ddp_bf16+async", 20, 4), ("fsdp2_bf16+async", 20, 5), ("hsdp_bf16", 20, 6), ("tp_bf16", 20, 7)),
    ],
)
def test_ranks_killed_at_random_moments(
    engine: str, kills: int, seed: int, data: str, undisturbed: Any, tmp_path: Path
) -> None:
    rng, folder, doing, attempt = random.Random(seed), tmp_path / "killed", Counter[str](), -1
    process = torchrun(folder, engine, kills + 5, data, RANKS.get(engine, 2))
    try:
        for number in range(kills):
            attempt, ranks = begun(folder, attempt, process, RANKS.get(engine, 2))
            (rank,) = rng.sample(range(len(ranks)), 1)
            if number % 5 > 1:
                time.sleep(rng.uniform(0, 0.4))
            else:  # where the machine is busy, all kills could land in what comes before
                awaited = ("saving", "training")[number % 5]
                wait_until(lambda now=attempt, of=rank, word=awaited: told(folder, now, of)[-1] == word)
            os.kill(ranks[rank], signal.SIGKILL)
            word = told(folder, attempt, rank)[-1]
            doing["starting" if word.isdigit() else word] += 1
            print(f"seed {seed}, attempt {attempt}: killed rank {rank} while {word}")  # shown when the test fails
        check_final(folder, process, undisturbed(engine, data))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (
        data != "resumable" or kills < 20 or doing.keys() >= {"starting", "training", "saving"}
    )  # the kills did land where it matters


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp_bf16", "fsdp2_bf16"])
def test_a_machine_whose_torchrun_is_terminated(engine: str, undisturbed: Any, tmp_path: Path) -> None:
    """As a spot machine is taken away, and another one comes."""
    folder = tmp_path / "spot"
    process = torchrun(folder, engine, 0)
    attempt, _ = begun(folder, -1, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert process.returncode
    (path,) = (folder / "run").glob("preempted-step=*.ckpt")
    for rank in range(2):
        assert told(folder, attempt, rank)[-1] == "saving"
    again = torchrun(folder, engine, 0)
    check_final(folder, again, undisturbed(engine))
    assert f"Restoring states from the checkpoint path at {path}" in (folder / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp_bf16", "fsdp2_bf16"])
def test_a_machine_that_is_taken_away_for_good(engine: str, tmp_path: Path) -> None:
    """The other one goes on alone, with every sample once an epoch, and ends where the schedule does."""
    folder = tmp_path / "gone"
    process = torchrun(folder, engine, 0, "shuffled")
    begun(folder, -1, process)
    wait_until(lambda: (folder / "run").exists() and len(list((folder / "run").glob("step=*"))) > 1)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    ((_, last),) = final(folder, torchrun(folder, engine, 0, "shuffled", ranks=1), 1)
    seen: dict[int, list[int]] = {}
    for file in folder.glob("samples-*"):
        for epoch, numbers in map(json.loads, file.read_text().splitlines()):
            seen.setdefault(epoch, []).extend(numbers)
    assert sorted(seen) == [*range(EPOCHS)]
    for numbers in seen.values():
        assert sorted(numbers) == [*range(44)]  # which two ranks share without a rest
    assert 6 * EPOCHS < last < 11 * EPOCHS  # steps of an epoch of two ranks, and of one


SCRIPT = """
import sys, time
import lightning as L
import lightning_tricks as lt
from lightning.pytorch.callbacks import Callback
from tests.nets import PlainNet, build, loader, trainer

class Slowly(Callback):
    def on_train_batch_end(self, trainer, *_):
        print("step", trainer.global_step, flush=True)
        time.sleep(0.05)

if __name__ == "__main__":
    settings = {"strategy": "ddp_bf16", "devices": 2, "max_epochs": -1, "max_steps": int(sys.argv[2])}
    run = trainer(**settings, callbacks=[lt.Preemption(sys.argv[1]), Slowly()])
    run.fit(build(PlainNet), loader(), loader(8), ckpt_path="newest")
    print("trained", run.global_step)
"""


@pytest.mark.slow
def test_a_script_whose_main_process_is_terminated(tmp_path: Path) -> None:
    """Lightning has started the other process, which gets no signal."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command, environment = [sys.executable, str(script), str(tmp_path / "run")], {**os.environ, "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*command, "100000"], env=environment, start_new_session=True, **options)
    try:
        assert process.stdout is not None
        assert any(line.startswith("step 5") for line in process.stdout)
        process.terminate()
        output, _ = process.communicate(timeout=60)  # until both have closed it
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in output
    (path,) = (tmp_path / "run").iterdir()
    step = int(path.stem.split("=")[1])
    again = subprocess.run([*command, str(step + 2)], env=environment, check=True, **options)
    assert f"trained {step + 2}" in again.stdout
