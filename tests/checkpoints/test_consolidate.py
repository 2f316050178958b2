"""One file from the folders of two ranks: the right values, little memory, whole or not there."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.checkpoints.consolidate import consolidate
from lightning_tricks.checkpoints.folders import lazy_weights
from tests.checkpoints.sharded import Sharded, Tied
from tests.checkpoints.test_average import peak
from tests.conformance.engines import cpu_deepspeed
from tests.nets import PlainNet, assert_equal, build, rank_loader, trainer, weights
from tests.ranks import run_ranks

ENGINES = ["fsdp2", "zero1", "zero2", "zero3"]


def strategy(engine: str) -> Any:
    return ModelParallelStrategy(2, 1) if engine == "fsdp2" else cpu_deepspeed(int(engine[-1]))


def fit(engine: str, module: Any, **settings: Any) -> Any:
    run = trainer(strategy=strategy(engine), devices=2, max_epochs=1, use_distributed_sampler=False, **settings)
    run.fit(module, rank_loader())
    return run


def save_all(folder: str) -> dict[str, dict[str, Any]]:
    """One folder an engine; what its averages are, as the callback gathers them."""
    expected = {}
    for engine in ENGINES:
        ema = lt.EMA(decay=0.5)
        run = fit(engine, build(Sharded if engine == "fsdp2" else Tied), callbacks=[ema])
        run.save_checkpoint(f"{folder}/{engine}.ckpt")
        expected[engine] = ema.averaged_state_dict()
    return expected


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save_all, str(folder))[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_one_file_holds_what_was_validated(saved: Any, engine: str, tmp_path: Path) -> None:
    folder, expected = saved[0] / f"{engine}.ckpt", dict(saved[1][engine])
    written = consolidate(folder, str(tmp_path / "a.pt"))
    assert written == tmp_path / "a.pt"
    loaded = torch.load(written, mmap=True)
    assert list(loaded) == list(expected)
    assert loaded.pop("_extra_state", None) == expected.pop("_extra_state", None)
    assert_equal(loaded, expected)
    if engine != "fsdp2":
        consolidate(folder, tmp_path / "a.safetensors")
        assert_equal(load_file(tmp_path / "a.safetensors"), expected)
        assert loaded["again.weight"].data_ptr() == loaded["layers.2.weight"].data_ptr()
    assert not any(each.name.startswith(".") for each in tmp_path.iterdir())
    module = build(Tied)
    module.load_state_dict(loaded)
    assert_equal(weights(module), expected)


# -- memory -----------------------------------------------------------------------------------------------------------


class Wide(PlainNet):
    """``count`` square weights, a quarter of them frozen."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__(0.1)
        self.layers = nn.Sequential(
            nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(count)), nn.Linear(width, 2)
        )
        for layer in self.layers[1 : 1 + count // 4]:
            layer.weight.requires_grad_(False)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def save_wide(folder: str, engines: list[str], count: int, width: int) -> None:
    for engine in engines:
        fit(engine, build(Wide, count=count, width=width), limit_train_batches=1).save_checkpoint(
            f"{folder}/{engine}.ckpt"
        )


def peaks_of(folder: str, engines: list[str]) -> dict[str, int]:
    """MiB that consolidating needs at its peak, by the name of the file."""
    import deepspeed  # noqa: F401
    import safetensors.torch  # noqa: F401

    peaks = {}
    for name in (f"{engine}.{suffix}" for engine in engines for suffix in ("safetensors", "pt")):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free and still held would hide what is needed
        write = partial(consolidate, f"{folder}/{name.split('.')[0]}.ckpt", f"{folder}/{name}")
        peaks[name] = peak(write) // 2**20
    return peaks


@pytest.mark.parametrize(
    ("engines", "count", "width", "most"),
    [(["fsdp2", "zero1", "zero3"], 32, 512, 12), pytest.param(ENGINES, 75, 1024, 30, marks=pytest.mark.slow)],
    ids=["32 MiB", "300 MiB"],
)
@pytest.mark.slow
def test_memory_is_that_of_a_few_tensors(engines: list[str], count: int, width: int, most: int, tmp_path: Path) -> None:
    run_ranks(save_wide, str(tmp_path), engines, count, width, timeout=300)
    (peaks,) = run_ranks(peaks_of, str(tmp_path), engines, nprocs=1)
    print(peaks)
    assert len(peaks) == 2 * len(engines)
    assert all((tmp_path / name).stat().st_size > count * width**2 * 4 for name in peaks)
    assert 0 < max(peaks.values()) < most


# -- errors -----------------------------------------------------------------------------------------------------------


def consolidate_on_a_full_disk(folder: str, output: str) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit then fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
    with pytest.raises(OSError, match=r"large|write|written") as caught:
        consolidate(folder, output, force=True)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_full_disk_leaves_the_old_file(saved: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("old")
    (message,) = run_ranks(consolidate_on_a_full_disk, str(saved[0] / "zero3.ckpt"), str(tmp_path / name), nprocs=1)
    assert "\n" not in message
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(name, "old")]


CASES = [
    ("fsdp2", ".metadata", None, "it has no .metadata: saving was interrupted"),
    ("fsdp2", "meta.pt", None, "it has no meta.pt: saving was interrupted"),
    ("fsdp2", "__1_0.distcp", None, "__1_0.distcp has 0 bytes of"),
    ("fsdp2", "__1_0.distcp", 100, "__1_0.distcp has 100 bytes of"),
    ("fsdp2", ".metadata", 100, "is damaged"),
    ("zero3", "latest", None, "it has no latest, which DeepSpeed writes last: saving was interrupted"),
    ("zero3", "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt", None, "states of 1 ranks, expected 2"),
    ("zero3", "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt", 1000, "is damaged"),
    ("zero1", "checkpoint/mp_rank_00_model_states.pt", None, "it has no model and optimizer states in 'checkpoint'"),
    ("zero1", "checkpoint/mp_rank_00_model_states.pt", 1000, "is damaged"),
]


@pytest.mark.parametrize(("engine", "file", "size", "message"), CASES)
def test_a_folder_that_is_not_whole_is_refused(
    saved: Any, engine: str, file: str, size: int | None, message: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved[0] / f"{engine}.ckpt", tmp_path / "half.ckpt"))
    if size is None:
        (folder / file).unlink()
    else:
        os.truncate(folder / file, size)
    with pytest.raises(ValueError, match=r"half\.ckpt") as caught:
        consolidate(folder, tmp_path / "a.pt")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["half.ckpt"]


def test_damage_found_while_writing_leaves_nothing(saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[0] / "fsdp2.ckpt", tmp_path / "half.ckpt"))
    shard = folder / "__1_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(ValueError, match=r"half\.ckpt is damaged"):
        consolidate(folder, tmp_path / "a.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["half.ckpt"]


def test_what_is_no_folder_or_would_be_overwritten(saved: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "file.ckpt")
    with pytest.raises(NotADirectoryError, match=r"file\.ckpt is one file already: .* lightning-tricks export"):
        consolidate(tmp_path / "file.ckpt", tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*none\.ckpt"):
        consolidate(tmp_path / "none.ckpt", tmp_path / "a.pt")
    with pytest.raises(FileExistsError, match=r"force=True"):
        consolidate(saved[0] / "zero1.ckpt", tmp_path / "file.ckpt")
    consolidate(saved[0] / "zero1.ckpt", tmp_path / "file.ckpt", force=True)
    assert "layers.0.weight" in torch.load(tmp_path / "file.ckpt")


def test_extra_state_is_for_torch_files(saved: Any, tmp_path: Path) -> None:
    assert lazy_weights(saved[0] / "fsdp2.ckpt")["_extra_state"] == {"note": "extra"}
    with pytest.raises(ValueError, match=r"another value for _extra_state: write a \.pt file"):
        consolidate(saved[0] / "fsdp2.ckpt", tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())
