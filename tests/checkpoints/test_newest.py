"""The checkpoint that has trained longest, by its own account, and none that is damaged or unfinished."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import warnings
from collections import OrderedDict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lightning_tricks as lt
from lightning_tricks import newest_checkpoint
from lightning_tricks.core.safe_load import atomic_folder
from lightning_tricks.core.safe_load.own_folder import MARKER
from tests.callbacks.test_preemption import strategy
from tests.nets import Net, NormNet, PlainNet, build, fit, rank_loader, trainer
from tests.ranks import run_ranks

FILES = ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", "step=8.ckpt"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two epochs of six steps leave: some steps, the ends of the epochs, and weights only."""
    folder = tmp_path_factory.mktemp("saved")
    steps = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)
    epochs = ModelCheckpoint(folder / "epochs", "{step}", save_top_k=-1)
    light = ModelCheckpoint(folder / "light", "{step}", every_n_train_steps=3, save_weights_only=True)
    fit(build(NormNet), callbacks=[steps, epochs, light], enable_checkpointing=True)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """The first four steps, in a folder that may be changed."""
    for name in FILES:
        shutil.copy2(run / name, tmp_path / name)
    return tmp_path


def flip(file: Path, place: float, size: int = 1) -> None:
    """Change one bit of each of ``size`` bytes."""
    content = bytearray(file.read_bytes())
    start = int(place * (len(content) - size))
    content[start : start + size] = bytes(byte ^ 4 for byte in content[start : start + size])
    file.write_bytes(content)


def cut(file: Path, size: int | float) -> None:
    os.truncate(file, size if isinstance(size, int) else int(size * file.stat().st_size))


# ---- which is the newest


def test_the_newest_has_the_most_steps_whatever_clocks_say(copied: Path) -> None:
    for age, name in enumerate(FILES):
        os.utime(copied / name, (1e9 - age, 1e9 - age))
    shutil.copy(copied / "step=2.ckpt", copied / "copied today.ckpt")
    os.utime(copied / "step=4.ckpt", (5e9, 5e9))  # by a clock of another age
    assert newest_checkpoint(copied) == str(copied / "step=8.ckpt")


def test_of_two_with_the_same_step_the_newest_has_ended_its_epoch(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "epochs" / "step=6.ckpt", tmp_path / "end.ckpt")
    shutil.copy(run / "step=6.ckpt", tmp_path / "step.ckpt")
    os.utime(tmp_path / "end.ckpt", (1e9, 1e9))
    assert newest_checkpoint(tmp_path) == str(tmp_path / "end.ckpt")


def test_of_two_with_the_same_progress_the_newest_was_written_last(copied: Path) -> None:
    shutil.copy(copied / "step=8.ckpt", copied / "last.ckpt")
    assert newest_checkpoint(copied) == str(copied / "last.ckpt")
    os.utime(copied / "last.ckpt", (1e9, 1e9))
    assert newest_checkpoint(str(copied)) == str(copied / "step=8.ckpt")


@pytest.mark.parametrize("step", ["12", None, 3.5, torch.tensor(99)], ids=str)
def test_a_step_that_is_no_number_is_left_out_or_the_only_one(step: Any, copied: Path) -> None:
    changed = copied / FILES[3]
    saved = torch.load(changed, weights_only=True)
    torch.save({**saved, "global_step": step}, changed)
    with pytest.warns(UserWarning, match=r"step=8\.ckpt is left out: its global_step and its number of epochs must be"):
        assert newest_checkpoint(copied) == str(copied / FILES[2])
    for name in FILES[:3]:
        (copied / name).unlink()
    assert newest_checkpoint(copied) == str(changed)


def test_a_pipe_is_left_out(copied: Path) -> None:
    os.mkfifo(copied / "step=10.ckpt")
    with pytest.warns(UserWarning, match=r"step=10\.ckpt is left out: it is no file"):
        assert newest_checkpoint(copied) == str(copied / FILES[3])


def test_folders_are_searched_and_weights_alone_left_out(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "light", tmp_path / "light")
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "lightning_logs/version_1/checkpoints").mkdir(parents=True)
    path = shutil.copy(run / "step=2.ckpt", tmp_path / "lightning_logs/version_1/checkpoints/a.ckpt")
    torch.save(NormNet().state_dict(), tmp_path / "pretrained.ckpt")
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    assert newest_checkpoint(tmp_path) == str(path)


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is newest_checkpoint(tmp_path / "none") is None


def test_what_is_no_folder_is_refused(run: Path) -> None:
    with pytest.raises(NotADirectoryError, match="name the folder of the run"):
        newest_checkpoint(run / FILES[0])
    with pytest.raises(ValueError, match="copy its checkpoints to one"):
        newest_checkpoint("s3://bucket/run")
    with pytest.raises(TypeError, match="folder must be str or PathLike, got None"):
        newest_checkpoint(None)  # type: ignore[arg-type]


def test_a_checkpoint_of_another_network_is_refused_when_it_is_loaded(run: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Missing key|size mismatch|Unexpected key"):
        fit(build(PlainNet), ckpt_path=newest_checkpoint(run))


# ---- damage


@pytest.mark.parametrize(
    "harm",
    [partial(cut, size=0), partial(cut, size=1), partial(cut, size=0.5), partial(cut, size=0.999)]
    + [partial(flip, place=place, size=100) for place in (0.3, 0.5, 0.7)]
    + [lambda file: file.write_text("no checkpoint")],
)
def test_a_damaged_file_is_left_out(harm: Any, copied: Path) -> None:
    for name in FILES[2:]:
        harm(copied / name)
    with pytest.warns(UserWarning, match="is left out: ") as warned:
        assert newest_checkpoint(copied) == str(copied / "step=4.ckpt")
    assert sorted(str(each.message).split(" is left out: ")[0] for each in warned) == [
        str(copied / name) for name in FILES[2:]
    ]


def test_no_flipped_bit_is_resumed_from(copied: Path) -> None:
    """Every part of the file in turn; a flip that changes nothing that is read does no harm."""
    path, rng = copied / "step=8.ckpt", random.Random(3)
    content, whole = path.read_bytes(), torch.load(path, weights_only=True)
    left_out = 0
    for _ in range(60):
        flip(path, rng.random())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = newest_checkpoint(copied)
        if found == str(path):
            again = torch.load(path, weights_only=True)
            assert all(torch.equal(again["state_dict"][name], value) for name, value in whole["state_dict"].items())
            assert again["global_step"] == whole["global_step"]
        left_out += found != str(path)
        path.write_bytes(content)
    assert left_out > 30


# ---- objects in the file


class Kind(Enum):
    ONE = 1


class Rich(Net):
    """Saves all that users put into checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = [
            *(Path("a"), Kind.ONE, OrderedDict(a=1), argparse.Namespace(a=1), np.arange(3), np.float64(2)),
            *({1, 2}, frozenset({3}), partial(print, end=""), torch.float16, slice(2), Net, OSError("a"), 1 + 2j),
        ]


class Bomb:
    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_whatever_is_in_a_checkpoint_its_step_is_found_and_nothing_runs(tmp_path: Path) -> None:
    run = fit(build(Rich))
    run.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=False)
    torch.save({**checkpoint, "bomb": Bomb()}, tmp_path / "a.ckpt")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "a.ckpt")


# ---- folders of shards


class Score(Callback):
    """Has a tensor in its state, as ``ModelCheckpoint`` has."""

    def state_dict(self) -> dict[str, Any]:
        return {"score": torch.full((64,), 0.25)}


def save_twice(folder: str, engine: str) -> None:
    """Checkpoints of steps 1 and 3, with averages."""
    for steps in (1, 3):
        callbacks = [lt.EMA(0.5), Score()]
        made = trainer(**strategy(engine), devices=2, max_steps=steps, max_epochs=-1, callbacks=callbacks)
        made.fit(build(PlainNet), rank_loader())
        made.save_checkpoint(f"{folder}/{steps}.ckpt")


@pytest.mark.parametrize("engine", ["fsdp2_bf16", "zero1_bf16", pytest.param("zero3_bf16", marks=pytest.mark.slow)])
def test_a_folder_that_is_damaged_or_not_finished_is_left_out(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(save_twice, str(tmp_path / "run"), engine)
    first, last = tmp_path / "run/1.ckpt", tmp_path / "run/3.ckpt"
    assert newest_checkpoint(tmp_path) == str(last)
    shutil.copytree(last, tmp_path / "kept")
    others = (".py", MARKER)  # which no resume reads
    files = [each.relative_to(last) for each in last.rglob("*") if each.is_file() and not each.name.endswith(others)]
    assert len(files) >= 4
    for file in files:
        harms: list[Any] = [Path.unlink, partial(cut, size=0), partial(cut, size=0.5)]
        harms += [partial(flip, place=0.5, size=100)] if file.suffix in (".pt", ".distcp") else []
        for harm in harms:
            harm(last / file)
            with pytest.warns(UserWarning, match=r"3\.ckpt is left out"):
                assert newest_checkpoint(tmp_path) == str(first), (file, harm)
            shutil.copy(tmp_path / "kept" / file, last / file)
    assert newest_checkpoint(tmp_path) == str(last)
    for file in last.rglob("*.pt"):  # one byte of a tensor, which no pickle shows
        whole = file.read_bytes()
        if (place := whole.find(torch.full((64,), 0.25).numpy().tobytes())) >= 0:
            file.write_bytes(whole[: place + 9] + bytes([whole[place + 9] ^ 64]) + whole[place + 10 :])
            with pytest.warns(UserWarning, match=r"3\.ckpt is left out"):
                assert newest_checkpoint(tmp_path) == str(first), file
            file.write_bytes(whole)
    shutil.rmtree(last / "averages")  # a stock strategy names the folder before they are written
    with pytest.warns(UserWarning, match=r"3\.ckpt is left out: it has no averages of EMA\(decay=0.5\)"):
        assert newest_checkpoint(tmp_path) == str(first)
    shutil.copytree(tmp_path / "kept" / "averages", last / "averages")
    # Killed between two renames, and while saving: names by atomic_folder.py
    last.rename(atomic_folder.hidden(last, "0" * 8, "old"))
    (tmp_path / "kept").rename(atomic_folder.hidden(tmp_path / "run/5.ckpt", "0" * 8, "saving"))
    assert newest_checkpoint(tmp_path) == str(tmp_path / "run" / f".3.ckpt.{'0' * 8}.old")
