"""A file is the old one or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_tricks.core.safe_load.atomic_file import atomic_write


def test_the_name_changes_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")
    path.chmod(0o640)
    with atomic_write(path) as file:
        file.write_text("new")
        assert file.suffix == ".png"
        assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_mode_of_any_other_and_a_link_is_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "a.png", tmp_path / "b.png"
    other.write_text("other")
    path.symlink_to(other)
    with atomic_write(path) as file:
        file.write_text("new")
    assert (path.is_symlink(), path.read_text(), other.read_text()) == (False, "new", "other")
    assert path.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize("what", ["folder", "pipe", "link to a folder", "device"])
def test_what_is_no_file_is_not_replaced(what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null" if what == "device" else tmp_path)
    with pytest.raises(FileExistsError, match=r"a\.png exists and is no file: choose another name"), atomic_write(path):
        raise AssertionError("the block is not entered")
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    ("error", "said", "raised", "match"),
    [
        (OSError, ["the disk is full"], OSError, r"a\.png was not written: the disk is full"),
        (OSError, [], OSError, r"a\.png was not written: OSError$"),
        (RuntimeError, ["basic_ios::clear: iostream error\nat line 3"], OSError, r"written: basic_ios.* error$"),
        (RuntimeError, ["[enforce fail at inline_container.cc:672] . unexpected pos"], OSError, "was not written"),
        (RuntimeError, ["write(): fd 3 failed with No space left on device"], OSError, "was not written"),
        (
            RuntimeError,
            ["CUDA error: an illegal memory access"],
            RuntimeError,
            "^CUDA error: an illegal memory access$",
        ),
        (RuntimeError, [], RuntimeError, "^$"),
        (KeyError, ["full"], KeyError, "full"),
    ],
)
def test_an_error_leaves_the_old_file(
    tmp_path: Path, error: type[Exception], said: list[str], raised: type[Exception], match: str
) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")
    with pytest.raises(raised, match=match), atomic_write(path) as file:
        file.write_text("half")
        raise error(*said)
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]
    assert path.read_text() == "old"
