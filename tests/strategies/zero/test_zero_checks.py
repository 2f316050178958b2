"""What DeepSpeed cannot do is an error with a remedy; the others are in test_deepspeed.py, through a Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.strategies.zero.preset import check_shards


def test_shards_are_loaded_by_as_many_ranks(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for rank in range(2):
        (tmp_path / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    check_shards("zero3_bf16", tmp_path, 2)
    check_shards("zero2_bf16", tmp_path, None)
    with pytest.raises(MisconfigurationException, match=r"shards of 2 processes, .* got 3. Resume on 2"):
        check_shards("zero3_bf16", tmp_path, 3)


def test_one_file_is_no_shards(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").touch()
    with pytest.raises(MisconfigurationException, match=r"is one file, .* load_full_weights=True"):
        check_shards("zero3_bf16", tmp_path / "a.ckpt", 2)
