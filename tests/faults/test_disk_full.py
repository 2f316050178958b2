"""A disk that is full while something is saved: what was there stays, and no file is half written."""

from __future__ import annotations

import gc
import re
import resource
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt
from lightning_tricks.checkpoints import average_checkpoints, consolidate, export_weights, greedy_soup
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from tests.faults.everything import TRAININGS, Everything, fresh, make, outcome, run
from tests.faults.runs import differences, load
from tests.nets import TORCH_2_9
from tests.ranks import run_ranks

LIMIT = 1000  # bytes of a file: less than any file here


@contextmanager
def full_disk(limit: int = LIMIT) -> Iterator[None]:
    """No file of this process grows beyond that many bytes: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- what is written at the end ---------------------------------------------------------------------------------------


def figure(path: Path) -> None:
    from matplotlib.figure import Figure

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    drawn, _ = lt.plot_schedule(lt.cosine(optimizer, total_steps=10), 10, ax=Figure().subplots())
    with atomic_write(path) as file:  # as the commands do
        drawn.savefig(file)


WRITERS: dict[str, Callable[[Path, Path], Any]] = {
    "average_checkpoints": lambda folder, out: average_checkpoints([folder / "a.pt"] * 2, out, force=True),
    "greedy_soup": lambda folder, out: greedy_soup([folder / "a.pt"], lambda _: 1.0, out, force=True),
    "export_weights": lambda folder, out: export_weights(folder / "a.pt", out, force=True),
    "export_weights of a folder": lambda folder, out: export_weights(folder / "sharded.ckpt", out, force=True),
    "consolidate": lambda folder, out: consolidate(folder / "sharded.ckpt", out, force=True),
}
CASES = [*((name, suffix) for name in WRITERS for suffix in (".pt", ".safetensors")), ("plot", ".png")]


def inputs(folder: Path) -> None:
    state = {"w": torch.randn(64, 64)}
    torch.save(state, folder / "a.pt")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save({"state_dict": state}, checkpoint_id=folder / "sharded.ckpt", no_dist=True)
    torch.save({}, folder / "sharded.ckpt" / "meta.pt")


def write_all(folder: Path, wall: Callable[[], Any]) -> list[str]:
    """The errors of each writer behind the wall; what had the name is as it was, and beside it is nothing new."""
    said = []
    for name, suffix in CASES:
        out = folder / f"out{suffix}"
        out.write_bytes(b"old")
        before = sorted(each.name for each in folder.iterdir())
        with wall(), pytest.raises(OSError, match="was not written") as caught:
            figure(out) if name == "plot" else WRITERS[name](folder, out)
        assert out.read_bytes() == b"old", name
        assert sorted(each.name for each in folder.iterdir()) == before, name
        said.append(str(caught.value))
        figure(out) if name == "plot" else WRITERS[name](folder, out)
        assert out.read_bytes() != b"old", name
        out.unlink()
    return said


def limited(folder: str) -> list[str]:
    inputs(Path(folder))
    return write_all(Path(folder), full_disk)


def test_no_writer_leaves_a_part_of_a_file(tmp_path: Path) -> None:
    (said,) = run_ranks(limited, str(tmp_path), nprocs=1)
    assert all(str(tmp_path / "out") in each for each in said)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)  # a process may still look at it


def test_no_writer_leaves_a_part_of_a_file_on_a_small_disk(small_disk: Path) -> None:
    inputs(small_disk)
    filler = small_disk / "filler"

    @contextmanager
    def filled() -> Iterator[None]:
        gc.collect()  # torch 2.9 leaves files of the last export in cycles, which would be freed amid the next one
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(1024))
        try:
            yield
        finally:
            filler.write_bytes(b"")

    filler.touch()
    assert all(re.search(r" was not written: .*(No space|writ)", each) for each in write_all(small_disk, filled))


def errors_of_torch(folder: str) -> list[str]:
    """What each of torch's writers says on a disk that is full after some bytes of a file, wherever that is."""
    said, path, state = [], Path(folder) / "a.pt", {"w": torch.randn(32, 32), "n": [1, 2]}
    for zipped in (True, False):
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        size = path.stat().st_size
        for opened in (True, False):
            if TORCH_2_9 and zipped and not opened:
                continue  # it says nothing of the last bytes
            for limit in (*range(0, size, 97), size - 23, size - 1):
                with (
                    full_disk(limit),
                    pytest.raises(OSError, match="was not written") as caught,
                    atomic_write(path) as to,
                ):
                    if opened:
                        with to.open("xb") as file:
                            torch.save(state, file, _use_new_zipfile_serialization=zipped)
                    else:
                        torch.save(state, to, _use_new_zipfile_serialization=zipped)
                said.append(str(caught.value))
    return said


def test_whatever_torch_says_of_a_full_disk_is_told_as_that(tmp_path: Path) -> None:
    (said,) = run_ranks(errors_of_torch, str(tmp_path), nprocs=1)
    for one in ("File too large", r"write\(\)", *([] if TORCH_2_9 else ["iostream|inline_container"])):
        assert any(re.search(one, each) for each in said), one


# -- a training that saves at every step ------------------------------------------------------------------------------


class Saving(Callback):
    """Saves under one name after every step; the disk is full at one of them."""

    def __init__(self, path: Path, full_at: int, goes_on: bool) -> None:
        self.path, self.full_at, self.goes_on = path, full_at, goes_on
        self.failed: str | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != self.full_at:
            trainer.save_checkpoint(self.path)
            return
        try:
            with full_disk():
                trainer.save_checkpoint(self.path)
        except (OSError, RuntimeError) as error:
            self.failed = str(error)
            if not self.goes_on:
                raise


def train(
    folder: Path, training: str, full_at: int = -1, goes_on: bool = False, ckpt_path: Path | None = None
) -> tuple[Any, str | None]:
    made, module = make(folder, training=training), fresh(TRAININGS[training][0])
    saving = Saving(folder / "a.ckpt", full_at, goes_on)
    made.callbacks.append(saving)  # type: ignore[attr-defined]
    raised = None
    try:
        run(made, module, ckpt_path=ckpt_path)
    except (OSError, RuntimeError) as error:
        raised = str(error)
    return outcome(made, module) if raised is None else raised, saving.failed


def saved_on_a_full_disk(training: str, folder: str) -> None:
    root = Path(folder)
    for name in ("whole", "full", "on"):
        (root / name).mkdir()
    expected, _ = train(root / "whole", training)
    raised, failed = train(root / "full", training, full_at=9)
    assert raised == failed is not None
    assert [each.name for each in (root / "full").iterdir()] == ["a.ckpt"]
    assert load(root / "full" / "a.ckpt")["global_step"] == 8
    resumed, _ = train(root / "full", training, ckpt_path=root / "full" / "a.ckpt")
    assert not differences(resumed, expected)
    went_on, failed = train(root / "on", training, full_at=9, goes_on=True)
    assert failed is not None
    assert not differences(went_on, expected)


@pytest.mark.parametrize("training", ["everything", pytest.param("adapters", marks=pytest.mark.slow)])
def test_a_training_whose_disk_is_full_resumes_from_the_last_whole_checkpoint_or_goes_on(
    training: str, tmp_path: Path
) -> None:
    run_ranks(saved_on_a_full_disk, training, str(tmp_path), nprocs=1)


class Breaks(Everything):
    """Its loss is not a number once."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.global_step == 7 else loss


def stopped_on_a_full_disk(folder: str) -> str:
    made = make(Path(folder))
    made.callbacks[:] = [each for each in made.callbacks if not isinstance(each, lt.SkipNonFinite)]  # type: ignore
    made.callbacks.insert(0, lt.TerminateOnNonFinite())  # type: ignore[attr-defined]
    with full_disk(), pytest.raises(FloatingPointError) as caught:
        run(made, fresh(Breaks))
    return str(caught.value)


def test_the_reason_to_stop_is_told_on_a_full_disk(tmp_path: Path) -> None:
    (said,) = run_ranks(stopped_on_a_full_disk, str(tmp_path), nprocs=1)
    assert "TerminateOnNonFinite has stopped training after step 7" in said
    assert "The state before it and the batch are incomplete in" in said
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []
