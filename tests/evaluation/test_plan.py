"""Locks of folders in which a process trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_tricks.evaluation.plan import locked, require_lock


def test_a_lock_that_another_rank_is_making_is_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    require_lock(tmp_path)
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} on ")
    (tmp_path / ".lock").write_text("a list of packages")
    with pytest.raises(FileExistsError, match=r"\.lock is in the way: it is no lock"):
        require_lock(tmp_path)
