"""A file is the old one or the new one, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_tricks.core.whole_file import whole_file


def test_the_name_changes_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")
    with whole_file(path) as file:
        file.write_text("new")
        assert file.suffix == ".png"
        assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]
    assert path.read_text() == "new"


@pytest.mark.parametrize(("error", "raised"), [(OSError, OSError), (RuntimeError, OSError), (KeyError, KeyError)])
def test_an_error_leaves_the_old_file(tmp_path: Path, error: type[Exception], raised: type[Exception]) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")
    with pytest.raises(raised, match="full"), whole_file(path) as file:
        file.write_text("half")
        raise error("the disk is full")
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]
    assert path.read_text() == "old"
