"""A folder is cleared if its marker says that it is ours, and not for its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_tricks.core.safe_load.own_folder import (
    MARKER,
    is_ours,
    mark,
    marker_of,
    new_folder,
    remove,
    remove_file,
    require_own,
    unused,
)


def filled(folder: Path) -> Path:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "c").touch()
    (folder / "link").symlink_to(folder.parent)
    return folder


def test_one_of_ours_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "fold0"
    for _ in range(2):
        new_folder(folder, "fit")
        assert os.listdir(folder) == [MARKER]
        filled(folder)
    remove(folder)
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "fold0").mkdir()
    new_folder(tmp_path / "fold0", "fit")
    assert is_ours(tmp_path / "fold0", "fit")


@pytest.mark.parametrize("marker", [None, b"", b"of the user", marker_of("checkpoint"), marker_of("fit") + b"."])
def test_what_has_no_marker_for_this_purpose_stays(marker: bytes | None, tmp_path: Path) -> None:
    folder = filled(tmp_path / "fold0")
    if marker is not None:
        (folder / MARKER).write_bytes(marker)
    with pytest.raises(FileExistsError, match=r"fold0 is in the way: a folder with 'a' that .* Move it away, or"):
        new_folder(folder, "fit")
    assert (folder / "a" / "b" / "c").exists()


def test_a_link_to_one_of_ours_is_none_of_ours(tmp_path: Path) -> None:
    mark(filled(tmp_path / "ours"), "fit")
    (tmp_path / "link").symlink_to("ours")
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / MARKER).symlink_to(tmp_path / "ours" / MARKER)
    (tmp_path / "marked" / "mine").touch()
    assert not is_ours(tmp_path / "link", "fit")
    for name, found in (("link", "a link"), ("marked", "a folder with 'mine'"), ("file", "no folder")):
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError, match=f"{name} is in the way: {found}"):
            require_own(tmp_path / name, "fit")


def test_a_marker_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("of the user")
    with pytest.raises(FileExistsError):
        mark(tmp_path, "fit")
    (tmp_path / MARKER).write_bytes(marker_of("fit")[:9])  # of a process that was killed
    assert is_ours(mark(tmp_path, "fit"), "fit")


def test_a_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*gone: it was removed while it was in use"):
        new_folder(tmp_path / "gone" / "fold0", "fit")


def test_the_marker_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy disk keeps is still ours, and is removed the next time."""
    folder = mark(filled(tmp_path / "fold0"), "fit")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        remove(folder)
    assert is_ours(folder, "fit")
    remove(folder)
    assert not folder.exists()


def test_a_name_that_nothing_has(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("none")
    (tmp_path / "a-v1.png").mkdir()
    assert unused(tmp_path, "a", ".png") == tmp_path / "a-v2.png"
    assert remove_file(tmp_path / "a.png")
    assert not remove_file(tmp_path / "a.png")
