"""Checkpoints that are folders of slices, in two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.nets import SaveAt, assert_equal
from tests.ranks import run_ranks
from tests.strategies.sharded import Stateless, Transformer, resumed, two, whole


def folders(folder: str) -> Any:
    path = f"{folder}/half.ckpt"
    results = resumed({}, path)
    assert Path(path).is_dir()

    class OtherGroups(Transformer):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with pytest.raises(ValueError, match="other parameters, or other groups of them"):
        two(OtherGroups, ckpt_path=path)
    Path(folder, "empty").mkdir(exist_ok=True)
    with pytest.raises(MisconfigurationException, match=r"empty is not a complete checkpoint: it has neither"):
        two(Transformer, ckpt_path=f"{folder}/empty")
    return results


@pytest.mark.slow
def test_a_folder_resumes_exactly_and_evaluates_the_same(tmp_path: Path) -> None:
    for trained, loaded in run_ranks(folders, str(tmp_path)):
        assert trained["scores"] == loaded["scores"]
        assert torch.equal(trained["predicted"], loaded["predicted"])


def offloaded(folder: str) -> Any:
    first, _ = two(Stateless, callbacks=[SaveAt(f"{folder}/stateless.ckpt", epoch=0)])
    again, _ = two(Stateless, ckpt_path=f"{folder}/stateless.ckpt")
    assert_equal(whole(again), whole(first))
    return resumed({"offload": True}, f"{folder}/half.ckpt")


@pytest.mark.slow
def test_from_host_memory_and_without_states_too(tmp_path: Path) -> None:
    for trained, loaded in run_ranks(offloaded, str(tmp_path)):
        assert trained["scores"] == loaded["scores"]
        assert torch.equal(trained["predicted"], loaded["predicted"])
