"""Cross-validation in several processes, and in one that is killed: always the same folds and the same result."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sklearn.model_selection import KFold

from lightning_tricks.evaluation import CrossValidation, compare
from lightning_tricks.evaluation.plan import locked
from tests.evaluation.recipes import DATA, Scored, failing, make_loader, make_trainer, run, same
from tests.nets import trainer
from tests.ranks import run_alone, run_cases

ROOT = Path(__file__).parents[2]


def two(fold: int, folder: Path, **settings: Any) -> Any:
    return make_trainer(fold, folder, devices=2, **settings)


def case(name: str, folder: str) -> Any:
    """A cross-validation on a rank: its metrics, its predictions, and those of each checkpoint for its samples."""
    path = Path(folder) / name
    if name == "unsynced":
        with pytest.raises(MisconfigurationException, match="different values of loss: log it"):
            run(path, make_module=unsynced, make_trainer=lambda k, f: trainer(devices=2, strategy="ddp", max_epochs=1))
        return None
    if name == "again":
        path = path.with_name("ddp")
        (path / "fold1.pt").unlink(missing_ok=True)
    return checked(run(path, make_module=tried, make_trainer=partial(two, strategy="ddp")))


def tried(fold: int) -> Any:
    """A module whose default predict_step is tried before the first step."""

    class Tried(Scored):
        predict_step = L.LightningModule.predict_step

        def forward(self, x: Any) -> Any:
            return super().forward(x[0] if isinstance(x, list) else x)

    return Tried()


def unsynced(fold: int) -> Any:
    class Unsynced(Scored):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", batch[0].mean())

    return Unsynced()


def checked(found: CrossValidation) -> Any:
    for checkpoint, fold in zip(found.checkpoints, found.folds, strict=True):
        module = Scored()
        module.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
        with torch.no_grad():
            expected = module.eval()(DATA.tensors[0][fold.validation])
        torch.testing.assert_close(found.predictions[fold.validation], expected)
    splits = KFold(3, shuffle=True, random_state=0).split(range(44))
    assert [fold.validation for fold in found.folds] == [part.tolist() for _, part in splits]
    return found.metrics, found.predictions


def test_two_ranks_walk_the_same_folds_and_have_the_same_result(tmp_path: Path) -> None:
    found = run_cases(case, ["ddp", "again", "unsynced"], str(tmp_path))
    (metrics, predictions), (others, other_predictions) = found["ddp"]
    assert len(metrics) == 3
    assert metrics == others
    assert torch.equal(predictions, other_predictions)
    assert found["unsynced"] == [None, None]
    for again, repeated in found["again"]:
        assert again == metrics
        assert torch.equal(repeated, predictions)


def launched(folder: Path, strategy: str) -> Any:
    return checked(run(folder, make_trainer=partial(two, strategy=strategy)))


@pytest.mark.slow  # ddp_spawn, which differs in how it starts processes, takes two minutes
def test_a_strategy_that_starts_processes_for_each_call(tmp_path: Path) -> None:
    metrics, predictions = run_alone(launched, tmp_path / "cv", "ddp_fork")
    (expected, there), _ = run_cases(case, ["ddp"], str(tmp_path))["ddp"]
    assert [row["accuracy"] for row in metrics] == pytest.approx([row["accuracy"] for row in expected])
    torch.testing.assert_close(predictions, there)


SCRIPT = """
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.evaluation.recipes import run
from tests.evaluation.test_processes import checked, two

folder = Path(sys.argv[1])
torch.set_num_threads(1)
metrics, predictions = checked(run(folder / "cv", make_trainer=partial(two, strategy="ddp")))
torch.save((metrics, predictions), folder / f"{torch.distributed.get_rank()}.pt")
"""


@pytest.mark.slow
def test_a_script_that_ddp_starts_again_for_every_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    environment["PYTHONPATH"] = str(ROOT)
    for _ in range(2):  # the second time with finished folds, and one to do
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        (metrics, predictions), (others, other_predictions) = (torch.load(tmp_path / f"{k}.pt") for k in range(2))
        assert metrics == others
        assert torch.equal(predictions, other_predictions)
        (expected, there), _ = run_cases(case, ["ddp"], str(tmp_path / "torchrun"))["ddp"]
        assert metrics == expected
        assert torch.equal(predictions, there)
        (tmp_path / "cv" / "fold1.pt").unlink()


def sharded(name: str, folder: str) -> Any:
    found = run(Path(folder), make_trainer=partial(two, strategy=name))
    return found.metrics, found.predictions


@pytest.mark.slow
def test_with_a_sharding_preset(tmp_path: Path) -> None:
    (metrics, predictions), (others, there) = run_cases(sharded, ["fsdp2_bf16"], str(tmp_path))["fsdp2_bf16"]
    assert metrics == others
    assert predictions.shape == (44, 2)
    assert torch.equal(predictions, there)
    assert not predictions.isnan().any()


def kill_at_random(folder: Path, finished: int, seconds: float) -> None:
    """Start ``run`` in a process and kill it at a moment after some folds are finished."""
    process = get_context("forkserver").Process(target=run, args=(folder,))
    process.start()
    while not (folder / f"fold{finished - 1}.pt").exists() if finished else not (folder / "folds.json").exists():
        time.sleep(0.002)
        assert process.exitcode is None
    time.sleep(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0)


def test_a_run_that_was_killed_gives_the_same_table(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "cv", 1, random.SystemRandom().uniform(0, 0.3))
    assert (tmp_path / "cv" / "fold0.pt").exists()
    assert same(run(tmp_path / "cv"), run(tmp_path / "unbroken"))


@pytest.mark.slow
def test_so_it_does_at_any_moment_and_killed_again(tmp_path: Path) -> None:
    unbroken = run(tmp_path / "unbroken")
    numbers = random.SystemRandom()
    for number in range(8):
        folder = tmp_path / f"cv{number}"
        for finished in sorted(numbers.choices(range(3), k=2)):
            if not (folder / f"fold{finished}.pt").exists():
                kill_at_random(folder, finished, numbers.uniform(0, 0.6))
        assert same(run(folder), unbroken)


class Slow(Callback):
    """Tells which fold trains, and does so for minutes."""

    def __init__(self, fold: int) -> None:
        self.fold = fold

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"fold {self.fold} trains", flush=True)
        time.sleep(0.05)


def slow(fold: int, folder: Path) -> L.Trainer:
    return make_trainer(fold, folder, max_epochs=1000, callbacks=[Slow(fold)])


def compared(folder: Path) -> None:
    def arm(own: Path) -> tuple[Any, ...]:
        return slow(0, own), Scored(), make_loader(DATA, True), make_loader(DATA, False)

    compare({"one": arm, "other": arm}, metric="accuracy", mode="max", seeds=2, folder=folder)


@pytest.mark.parametrize("train", [partial(run, make_trainer=slow), compared], ids=["cross_validate", "compare"])
def test_a_folder_in_which_another_process_trains_is_refused_by_name(train: Any, tmp_path: Path) -> None:
    process = get_context("forkserver").Process(target=train, args=(tmp_path,))
    process.start()
    try:
        while not (tmp_path / ".lock").exists() or not (tmp_path / ".lock").read_text():
            time.sleep(0.01)
            assert process.exitcode is None
        with pytest.raises(ValueError, match=f"process {process.pid} on .* trains in {re.escape(str(tmp_path))}"):
            train(tmp_path)
        assert process.exitcode is None
    finally:
        process.kill()
        process.join()
    with locked(tmp_path):  # which goes with the process
        pass


def test_on_a_disk_without_locks_it_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with (
        pytest.warns(UserWarning, match=r"No locks available.* let one process at a time train in it"),
        locked(tmp_path),
    ):
        pass


WORKERS = """
import sys
from pathlib import Path

from tests.evaluation.recipes import run
from tests.evaluation.test_processes import slow

if __name__ == "__main__":
    run(Path(sys.argv[1]), workers=2, make_trainer=slow)
"""


@pytest.mark.slow
def test_the_processes_of_folds_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WORKERS)
    folder, environment = tmp_path / "cv", {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "script.py"), str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        for fold in range(2):
            assert f"fold {fold} trains\n" in process.stdout
        process.kill()
        process.communicate(timeout=30)  # until all that have its output have ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not [*folder.glob("fold*.pt")]
    assert same(run(folder), run(tmp_path / "unbroken"))


@pytest.mark.slow
def test_folds_in_processes_of_their_own_are_the_same(tmp_path: Path) -> None:
    assert same(run(tmp_path / "two", workers=2), run(tmp_path / "one"))
    assert sorted(path.name for path in (tmp_path / "two").glob("*.pt")) == ["fold0.pt", "fold1.pt", "fold2.pt"]


@pytest.mark.slow
def test_of_folds_in_processes_the_finished_ones_are_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died"):
        run(tmp_path / "cv", workers=2, make_trainer=failing)
    assert not (tmp_path / "cv" / "fold1.pt").exists()
    assert same(run(tmp_path / "cv"), run(tmp_path / "one"))
    with pytest.raises(MisconfigurationException, match="got a Trainer for 2: pass workers=1"):
        run(tmp_path / "ranks", workers=2, make_trainer=partial(make_trainer, devices=2))
