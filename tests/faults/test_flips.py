"""A flipped bit anywhere in what a command reads: an error, or the right weights, and never others."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tricks.checkpoints import average_checkpoints, consolidate, export_weights, greedy_soup
from tests.checkpoints.sharded import save_zero3
from tests.faults import everything
from tests.faults.runs import differences, train
from tests.faults.test_hostile import fsdp2
from tests.ranks import run_ranks


def merge(folder: Path, out: Path) -> None:
    export_weights(folder / "step=9.ckpt", out, merge=True, base=folder / "base.pt", force=True)


READERS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "average_checkpoints": ("file", lambda path, out: average_checkpoints([path, path], out, force=True)),
    "greedy_soup": ("file", lambda path, out: greedy_soup([path], lambda _: 1.0, out, force=True)),
    "export_weights": ("file", lambda path, out: export_weights(path, out, force=True)),
    "export_weights of FSDP2": ("fsdp2", lambda path, out: export_weights(path, out, force=True)),
    "export_weights of adapters": ("adapters", merge),
    "consolidate of FSDP2": ("fsdp2", lambda path, out: consolidate(path, out, force=True)),
    "consolidate of ZeRO-3": ("zero3", lambda path, out: consolidate(path, out, force=True)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each kind."""
    root = tmp_path_factory.mktemp("made")

    def make(kind: str) -> Path:
        path = root / kind / ("step=9.ckpt" if kind == "file" else "a.ckpt")
        if not path.exists():
            path.parent.mkdir()
            if kind == "file":
                train(path.parent)
            elif kind == "adapters":
                train(path.parent, trained=partial(everything.resume, training=kind))
                path.mkdir()
                path.with_name("step=9.ckpt").rename(path / "step=9.ckpt")
                torch.save(everything.fresh(everything.Images).state_dict(), path / "base.pt")
            else:
                run_ranks(fsdp2 if kind == "fsdp2" else save_zero3, str(path))
        return path

    return make


def flipped(path: Path, rng: random.Random) -> Iterator[str]:
    """Flip a random bit of a file, or of one in the folder, and flip it back; where it was."""
    # all but .metadata, torch's pickle of names and places, which has no checksum
    found = sorted(each for each in path.rglob("*") if each.is_file() and each.name != ".metadata")
    files = found or [path]
    while True:
        file = rng.choices(files, [each.stat().st_size for each in files])[0]
        position, bit = rng.randrange(file.stat().st_size), 1 << rng.randrange(8)
        for step in range(2):
            with file.open("r+b") as opened:
                opened.seek(position)
                (byte,) = opened.read(1)
                opened.seek(position)
                opened.write(bytes([byte ^ bit]))
            if step == 0:
                yield f"bit {bit} of byte {position} of {file.name}"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("reader", "flips"),
    [
        *((name, 40) for name in READERS if " " not in name),
        *(pytest.param(n, 400, marks=pytest.mark.slow) for n in READERS),
    ],
)
def test_a_flipped_bit_gives_no_other_weights(reader: str, flips: int, made: Any, tmp_path: Path) -> None:
    kind, read = READERS[reader]
    if kind == "zero3":
        pytest.importorskip("deepspeed")
    original, path, out, rng = made(kind), tmp_path / made(kind).name, tmp_path / "out.pt", random.Random(flips)
    (shutil.copytree if original.is_dir() else shutil.copy)(original, path)
    read(path, out)
    right, refused, wrong = torch.load(out), 0, []
    for where, _ in zip(flipped(path, rng), range(flips), strict=False):
        out.unlink(missing_ok=True)
        try:
            read(path, out)
        except (ValueError, OSError):
            refused += 1
            assert not out.exists()
        else:
            if differences(torch.load(out), right):
                wrong.append(where)
    assert not wrong, f"{len(wrong)} of {flips}: {wrong[:5]}"
    assert refused
