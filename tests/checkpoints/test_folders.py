"""Whole weights from the folders that two ranks saved, read by one process without a group."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_tricks.checkpoints import average_checkpoints, export_weights
from tests.checkpoints import sharded
from tests.nets import assert_equal, build
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp2") / "a.ckpt"
    return folder, run_ranks(sharded.save_fsdp2, str(folder))[0]


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("zero3") / "a.ckpt"
    return folder, run_ranks(sharded.save_zero3, str(folder))[0]


def save(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "meta.pt")
    return folder


def test_fsdp2(fsdp2: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, expected = fsdp2
    export_weights(folder, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt")
    assert loaded.pop("_extra_state") == expected["_extra_state"] == {"note": "extra"}
    assert_equal(loaded, {name: value for name, value in expected.items() if isinstance(value, Tensor)})
    export_weights(folder, tmp_path / "layers.safetensors", strip_prefix="layers.")
    average_checkpoints([tmp_path / "a.pt", tmp_path / "a.pt"], tmp_path / "mean.pt")
    build(sharded.Sharded).load_state_dict(torch.load(tmp_path / "mean.pt"))


def test_zero3(zero3: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, expected = zero3
    export_weights(folder, tmp_path / "a.safetensors")
    export_weights(folder, tmp_path / "a.pt")
    assert capsys.readouterr().out == ""
    loaded = torch.load(tmp_path / "a.pt")
    assert_equal(loaded, expected)
    build(sharded.Tied).load_state_dict(loaded)


def export_alone(folder: str, output: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        export_weights(folder, output)


def test_one_rank_of_a_group_exports_alone(fsdp2: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_ranks(export_alone, str(fsdp2[0]), str(tmp_path / "a.pt"), timeout=300)
    assert torch.load(tmp_path / "a.pt").keys() == fsdp2[1].keys()


def test_fsdp1_has_its_weights_under_another_name(tmp_path: Path) -> None:
    weight = torch.randn(3)
    folder = save(tmp_path / "a.ckpt", {"model": {"net.w": weight}, "optimizer_0": {"x": torch.ones(1)}})
    export_weights(folder, tmp_path / "a.pt")
    assert_equal(torch.load(tmp_path / "a.pt"), {"net.w": weight})


@pytest.mark.parametrize("which", ["fsdp2", "zero3"])
def test_a_damaged_folder_is_one_line(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(which)[0], tmp_path / "damaged.ckpt"))
    shards = [*folder.glob("*.distcp"), *folder.glob("checkpoint/*optim_states.pt")]
    assert len(shards) == 2
    os.truncate(shards[1], 100)
    with pytest.raises(ValueError, match=r"damaged\.ckpt is damaged or not a checkpoint") as caught:
        export_weights(folder, tmp_path / "a.pt")
    assert "\n" not in str(caught.value)
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"damaged\.ckpt is damaged or not a checkpoint"):
        export_weights(folder, tmp_path / "a.pt")
    (folder / (".metadata" if which == "fsdp2" else "latest")).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"damaged\.ckpt is .* checkpoint:"):
        export_weights(folder, tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_other_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither \.metadata \(FSDP\) nor latest \(ZeRO\)"):
        export_weights(tmp_path, tmp_path / "a.pt")
    folder = save(tmp_path / "other.ckpt", {"net.w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"other\.ckpt holds no weights under the names that Lightning gives them"):
        export_weights(folder, tmp_path / "a.pt")


def test_deepspeed_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.ckpt" / "checkpoint").mkdir(parents=True)
    (tmp_path / "a.ckpt" / "latest").write_text("checkpoint")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (tmp_path / "a.ckpt" / "checkpoint" / name).touch()
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\[deepspeed\]"):
        export_weights(tmp_path / "a.ckpt", tmp_path / "a.pt")


def test_raw_weights_of_a_folder_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a.ckpt", {"state_dict": {"w": torch.ones(2)}})
    with pytest.raises(ValueError, match="only the weights that were validated are exported"):
        export_weights(folder, tmp_path / "a.pt", which="raw")
    with pytest.raises(ValueError, match="choose an average with callback=; there are: none"):
        export_weights(folder, tmp_path / "a.pt", callback="EMA")


def test_averages_in_shards_are_those_of_the_state_dict_or_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a.ckpt", {"state_dict": {"w": torch.ones(2)}})
    save(folder / "averages" / "EMA(decay=0.9)", {"raw/w": torch.zeros(2), "averaged/w": torch.ones(2)})
    export_weights(folder, tmp_path / "a.pt")
    assert_equal(torch.load(tmp_path / "a.pt"), {"w": torch.ones(2)})
    save(folder / "averages" / "EMA(decay=0.5)", {"averaged/w": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"choose an average with callback=; there are: EMA\(decay=0\.5\), EMA"):
        export_weights(folder, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"has the averages of EMA\(decay=0\.5\) in shards only"):
        export_weights(folder, tmp_path / "b.pt", callback="EMA(decay=0.5)")
    export_weights(folder, tmp_path / "b.pt", callback="EMA(decay=0.9)")
    (folder / "averages" / "EMA(decay=0.5)" / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"EMA\(decay=0\.5\) is damaged"):
        export_weights(folder, tmp_path / "c.pt")
