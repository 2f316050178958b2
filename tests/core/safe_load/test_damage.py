"""Archives that are not as torch writes them, and folders that point elsewhere."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from lightning_tricks.checkpoints.files import load
from lightning_tricks.core.safe_load.damage import damage, is_program, unfinished, zero_tag
from tests.faults import hostile


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    """torch maps records into memory as they are: other numbers would be loaded than were saved."""
    torch.save({"w": torch.arange(1000.0)}, file := tmp_path / "a.pt")
    assert damage(file) is None
    with zipfile.ZipFile(file) as saved:
        records = {name: saved.read(name) for name in saved.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in records.items():
            packed.writestr(name, content)
    with pytest.raises(ValueError, match=r"a\.pt is damaged: its records are compressed"):
        load(file)


def test_records_that_overlap_are_refused_before_they_are_read(tmp_path: Path) -> None:
    assert damage(hostile.overlapping(tmp_path / "a", tmp_path / "mark")) == "its records overlap"


def test_a_program_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    program = hostile.program(tmp_path / "a", tmp_path / "mark")
    torch.save({}, plain := tmp_path / "b.ckpt")
    torch.save({}, old := tmp_path / "c.ckpt", _use_new_zipfile_serialization=False)
    assert [is_program(file) for file in (program, plain, old)] == [True, False, False]
    with pytest.raises(ValueError, match=r"a\.ckpt was not read: it is a program \(TorchScript\) and no checkpoint"):
        load(program)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["../other", "/tmp", "a/../../b", "..", "", " ", "a/b"])
def test_a_folder_of_deepspeed_that_names_one_elsewhere_is_not_complete(name: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(name)
    with pytest.raises(ValueError, match="its file latest names"):
        zero_tag(tmp_path)
    assert "its file latest names" in str(unfinished(tmp_path))


def test_the_folder_that_deepspeed_names(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("checkpoint\n")
    assert zero_tag(tmp_path) == tmp_path / "checkpoint"
