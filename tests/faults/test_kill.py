"""Training killed at any moment and resumed from what is on disk ends bit-equal to training that was not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lightning_tricks as lt
from tests.faults import everything, runs
from tests.faults.child import train_in_child
from tests.faults.runs import differences, load, state, train


def later(ckpt_path: Path | None, **settings: Any) -> L.Trainer:
    """Saves while it trains."""
    return runs.resume(ckpt_path, **lt.preset("single_bf16", precision="32-true", async_save=True), **settings)


TRAININGS: dict[str, Callable[..., L.Trainer]] = {
    "EMA": runs.resume,
    "async": later,
    **{name: partial(everything.resume, training=name) for name in everything.TRAININGS},
}

# ---- without a kill

SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"val_check_interval": 2},
    {"val_check_interval": 4, "check_val_every_n_epoch": None},
]


@pytest.mark.parametrize(
    "settings", [*(pytest.param(each, marks=pytest.mark.slow) for each in SETTINGS[:-1]), SETTINGS[-1]], ids=str
)
@pytest.mark.parametrize(
    "training", ["EMA", *(pytest.param(name, marks=pytest.mark.slow) for name in everything.TRAININGS)]
)
def test_every_checkpoint_of_a_run_resumes_bit_exactly(tmp_path: Path, training: str, settings: dict[str, Any]) -> None:
    resume = TRAININGS[training]
    if training == "in backward" and "accumulate_grad_batches" in settings:
        pytest.skip("StepInBackward refuses it by name")
    train(tmp_path / "whole", trained=resume, **settings)
    final = load(tmp_path / "whole" / "final.ckpt")
    paths = sorted((tmp_path / "whole").glob("*.ckpt"))
    assert len(paths) > final["global_step"]
    for path in paths:
        resume(path, **settings).save_checkpoint(tmp_path / "resumed.ckpt")
        assert not differences(state(load(tmp_path / "resumed.ckpt")), state(final)), path.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # ModelCheckpoint forgets the best, as it should here
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("training", TRAININGS)
def test_so_does_every_checkpoint_of_a_resumed_run(tmp_path: Path, training: str, settings: dict[str, Any]) -> None:
    resume = TRAININGS[training]
    if training == "in backward" and "accumulate_grad_batches" in settings:
        pytest.skip("StepInBackward refuses it by name")
    train(tmp_path / "whole", trained=resume, **settings)
    final = load(tmp_path / "whole" / "final.ckpt")
    for first in sorted((tmp_path / "whole").glob("*.ckpt")):
        train(tmp_path / first.stem, first, trained=resume, **settings)
        for path in sorted((tmp_path / first.stem).glob("*.ckpt")):
            resume(path, **settings).save_checkpoint(tmp_path / "resumed.ckpt")
            assert not differences(state(load(tmp_path / "resumed.ckpt")), state(final)), f"{first.name}, {path.name}"


# ---- with kills


def states(folder: Path, training: str) -> dict[int, Any]:
    """The states of a run that is not killed, by step."""
    train(folder, trained=TRAININGS[training])
    checkpoints = [load(path) for path in folder.glob("*step=*.ckpt")]
    return {checkpoint["global_step"]: state(checkpoint) for checkpoint in checkpoints}


def usable(folder: Path, known: dict[int, Any]) -> tuple[list[Path], list[Path]]:
    """The checkpoints that load, those to resume from first, and those that do not; one that lies is an error."""
    good, broken = [], []
    for path in folder.iterdir():
        assert path.suffix == ".ckpt", f"a temporary file beside the checkpoints: {path.name}"
        try:
            checkpoint = load(path)
        except Exception:
            broken.append(path)
        else:
            wrong = differences(state(checkpoint), known[checkpoint["global_step"]])
            assert not wrong, f"{path.name} was loaded with other values in {wrong}"
            good.append(path)
    return sorted(good, key=lambda path: (path.stem.startswith("last"), path.stat().st_mtime_ns), reverse=True), broken


def kill_until_done(
    folder: Path, training: str, known: dict[int, Any], across: bool, delays: Iterator[float]
) -> list[str]:
    """Train until a run ends that is not killed; what each that was killed was doing, and the files it left broken."""
    folder.mkdir()
    killed, good = [], []
    while True:
        end = train_in_child(folder, next(iter(good), None), across, TRAININGS[training], next(delays))
        good, broken = usable(folder, known)
        assert across or not broken, "a rename leaves no broken file"
        if not end.killed:
            break
        killed.append(f"{end.last} {' '.join(path.stem for path in broken)}")
    assert not differences(state(load(folder / "final.ckpt")), known[max(known)])
    return killed


@pytest.mark.parametrize(
    "across", [pytest.param(False, id="rename"), pytest.param(True, id="copy", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("training", "kills", "seed"),
    [
        ("everything", 3, 1),
        pytest.param("adapters", 20, 2, marks=pytest.mark.slow),  # whose processes import peft each
        pytest.param("async", 20, 2, marks=pytest.mark.slow),
        *(
            pytest.param(each, 100, 2, marks=pytest.mark.slow)
            for each in TRAININGS
            if each not in ("adapters", "async")
        ),
    ],
)
def test_killed_at_any_moment_training_resumes_bit_exactly(
    tmp_path: Path, across: bool, training: str, kills: int, seed: int
) -> None:
    known = states(tmp_path / "known", training)
    _, unfinished, duration = train_in_child(tmp_path / "whole", None, across, TRAININGS[training])
    assert not unfinished
    rng, killed = random.Random(seed), []
    delays = iter(lambda: rng.uniform(0, duration), None)
    for run in itertools.count():
        print(f"seed {seed}, {duration:.2f} s, killed while: {killed}")  # shown when the test fails
        killed += kill_until_done(tmp_path / str(run), training, known, across, delays)
        if len(killed) >= kills:
            break
    if kills >= 100:  # the kills did land where it matters
        assert sum(each.startswith("saving") for each in killed) > kills / 5
        assert not across or any(not each.endswith(" ") for each in killed)
