"""A damaged checkpoint is refused: cut off by torch, and by us with a flipped bit, which torch may load."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from tests.faults.runs import Resumable, Scheduled, differences, load, resume, train
from tests.nets import assert_equal, build, fit, weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One made in the middle of an epoch, with averages that differ from the weights."""
    folder = tmp_path_factory.mktemp("run")
    train(folder)
    return folder / "step=9.ckpt"


def refused(path: Path) -> bool:
    try:
        resume(path)
    except Exception:  # torch has no exception of its own for a bad file
        return True
    return False


def test_a_truncated_checkpoint_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    content, rng, path = checkpoint.read_bytes(), random.Random(3), tmp_path / "x.ckpt"
    ends = [0, 1, 21, 22, 23, len(content) - 22, len(content) - 1]  # around an empty zip's length and the last record
    for length in [*ends, *rng.choices(range(len(content)), k=20)]:
        path.write_bytes(content[:length])
        assert refused(path), f"{length} of {len(content)} bytes"


def test_the_objects_of_a_refused_resume_can_be_used_again(tmp_path: Path, checkpoint: Path) -> None:
    module, ema, same = build(Scheduled), lt.EMA(0.9, every_n_steps=2, start=0.2), build(Scheduled)
    (tmp_path / "x.ckpt").write_bytes(checkpoint.read_bytes()[:-1])
    for path in (tmp_path / "x.ckpt", checkpoint):
        try:
            fit(module, train=Resumable(), callbacks=[ema], max_epochs=3, ckpt_path=path)
        except Exception:
            assert path != checkpoint
            assert_equal(weights(module), weights(same))
    final = load(checkpoint.parent / "final.ckpt")["state_dict"]
    assert_equal(weights(module), final)


def test_a_flipped_bit_that_changes_what_is_loaded_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    content, rng, path, original = checkpoint.read_bytes(), random.Random(4), tmp_path / "x.ckpt", load(checkpoint)
    with zipfile.ZipFile(checkpoint) as file:
        records = file.start_dir  # a flip after it can make torch take a record for a folder, which has no checksum
    changed = 0
    while changed < 20:
        flipped, position = bytearray(content), rng.randrange(records)
        flipped[position] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            silent = differences(load(path), original)
        except Exception:
            continue  # torch itself refuses it
        if silent:
            changed += 1
            assert refused(path), f"byte {position}: {silent}"


def test_a_flipped_bit_of_a_weight_is_named(tmp_path: Path, checkpoint: Path) -> None:
    content, path = bytearray(checkpoint.read_bytes()), tmp_path / "x.ckpt"
    weight = load(checkpoint)["state_dict"]["layers.0.weight"].numpy().tobytes()
    content[content.index(weight)] ^= 1
    path.write_bytes(content)
    assert differences(load(path), load(checkpoint))
    with pytest.raises(MisconfigurationException, match=r"x\.ckpt is damaged: the checksum of .*data/\d+ is wrong"):
        resume(path)
