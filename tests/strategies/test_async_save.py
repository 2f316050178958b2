"""Checkpoints written while training goes on: the state of the moment of saving, and nothing lost by the delay."""

from __future__ import annotations

import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import lightning_tricks as lt
from lightning_tricks.strategies.async_save import staged
from tests.faults.runs import Resumable, Scheduled, differences, load, state
from tests.faults.test_disk_full import full_disk
from tests.nets import build, fit
from tests.ranks import run_alone, run_ranks


class Tied(Scheduled):
    """Two names of one weight, which a file has once."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(1, 1, bias=False)
        self.again.weight = next(layer for layer in self.layers if isinstance(layer, nn.Linear)).weight


def train(
    folder: Path, async_save: bool, *callbacks: Any, engine: str = "single_bf16", io: Any = None, **settings: Any
) -> L.Trainer:
    """Three epochs of six steps with a save every four."""
    given = {"every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}", **settings.pop("checkpoint", {})}
    own = {"process_group_backend": "gloo"} if engine == "ddp_bf16" else {}
    strategy = lt.preset(engine, precision="32-true", async_save=async_save, **own, **settings.pop("preset", {}))
    checkpoints = ModelCheckpoint(folder, **given)
    return fit(
        build(settings.pop("module", Tied)),
        train=Resumable(),
        callbacks=[lt.EMA(0.9), lt.ExactResume(), *callbacks, checkpoints],
        enable_checkpointing=True,
        plugins=[io] if io else [],
        **{**strategy, "max_epochs": 3, "devices": int(os.environ.get("WORLD_SIZE", 1)), **settings},
    )


def until(reached: Callable[[], bool], seconds: float = 0.5) -> None:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.001)


class SlowIO(TorchCheckpointIO):
    """A disk on which a file takes two steps of training, or until training waits for it."""

    def __init__(self) -> None:
        self.step = 0
        self.trained: list[int] = []  # steps during each write
        self.follows = LambdaCallback(on_train_batch_end=self.follow)

    def follow(self, trainer: L.Trainer, *_: Any) -> None:
        self.step = trainer.global_step

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        begun = self.step
        until(lambda: self.step >= begun + 2, 2.0)  # steps are slow where much else runs
        super().save_checkpoint(*args, **kwargs)
        self.trained.append(self.step - begun)


def test_a_file_has_the_state_of_the_moment_of_saving(tmp_path: Path) -> None:
    io = SlowIO()
    train(tmp_path / "now", False)
    train(tmp_path / "later", True, io.follows, io=io)
    assert sum(steps >= 2 for steps in io.trained) >= 3
    names = [path.name for path in sorted((tmp_path / "now").iterdir())]
    assert names == [path.name for path in sorted((tmp_path / "later").iterdir())]
    assert len(names) == 4
    for name in names:
        now, later = load(tmp_path / "now" / name), load(tmp_path / "later" / name)
        assert not differences(state(later), state(now))
        assert differences(later["callbacks"], now["callbacks"]) == [  # the folder, and its files
            path for path in differences(later["callbacks"], now["callbacks"]) if "ModelCheckpoint" in path
        ]
        first, *others = (tmp_path / kind / name for kind in ("now", "later"))
        assert all(abs(other.stat().st_size - first.stat().st_size) < 1000 for other in others)


def test_values_of_every_kind_are_copied_and_share_what_they_shared() -> None:
    weight, module = torch.ones(4), nn.Linear(2, 1)
    given = {"w": weight, "part": weight[1:], "list": [1, {"x": torch.zeros(2)}], "b": torch.ones(2).bfloat16()}
    kinds = {
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "sparse": torch.eye(2).to_sparse(),
        "leaf": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 2,
    }
    copy = staged({**given, **kinds, "module": module})
    weight.add_(1)
    given["list"][1]["x"].add_(1)
    given["list"].append(2)
    assert copy["w"].tolist() == [1] * 4
    assert copy["list"] == [1, {"x": mock.ANY}]
    assert copy["list"][1]["x"].tolist() == [0, 0]
    assert copy["part"].untyped_storage().data_ptr() == copy["w"].untyped_storage().data_ptr()
    assert copy["b"].dtype == torch.bfloat16
    written = io.BytesIO()
    torch.save({name: copy[name] for name in kinds}, written)
    written.seek(0)
    for name, tensor in torch.load(written, weights_only=True).items():
        assert tensor.requires_grad == kinds[name].requires_grad
        assert torch.equal(plain(tensor), plain(kinds[name]))
    assert type(copy["module"].weight) is nn.Parameter  # such as a hyperparameter, which is trained after loading it
    assert copy["module"].weight.data_ptr() != module.weight.data_ptr()
    with pytest.raises(MisconfigurationException, match="got a tensor that cannot be copied"):
        staged({"a": torch.ones(2, device="meta")})


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense().resolve_conj().resolve_neg()


def test_a_copy_is_gone_when_it_is_written() -> None:
    weight = torch.ones(4)
    gc.disable()
    try:
        memory = weakref.ref(staged({"w": weight})["w"].untyped_storage())
        assert memory() is None
    finally:
        gc.enable()


def test_what_comes_after_a_save_waits_for_it_and_training_does_not(tmp_path: Path) -> None:
    """Older checkpoints and links are there until the new one is."""
    seen: list[dict[str, Any]] = []
    gate = threading.Event()

    class Gate(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            if "step=8" in str(path):
                assert gate.wait(10)
            super().save_checkpoint(checkpoint, path, storage_options)

    def look(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 10:
            found = {path.name: path.resolve().name for path in tmp_path.iterdir()}
            seen.append({"found": found, "step": load(tmp_path / "last.ckpt")["global_step"]})
            gate.set()

    settings = {"save_top_k": 1, "save_last": "link"}
    run = train(tmp_path, True, LambdaCallback(on_train_batch_end=look), io=Gate(), checkpoint=settings)
    assert seen == [{"found": {"step=4.ckpt": "step=4.ckpt", "last.ckpt": "step=4.ckpt"}, "step": 4}]
    assert {path.name: path.resolve().name for path in tmp_path.iterdir()} == {
        "step=16.ckpt": "step=16.ckpt",
        "last.ckpt": "step=16.ckpt",
    }
    assert run.checkpoint_callback.best_model_path == str(tmp_path / "step=16.ckpt")


@pytest.mark.few(1)
@pytest.mark.parametrize("save_last", [True, "link"])
def test_names_are_those_of_saves_that_are_waited_for(save_last: Any, tmp_path: Path) -> None:
    settings = {"filename": "a", "monitor": "own_loss", "save_top_k": 2, "save_last": save_last}
    ended = [
        train(tmp_path / str(later), later, checkpoint=settings, module=Logged).checkpoint_callback
        for later in (False, True)
    ]
    now, later = (
        {Path(path).name: load(path)["global_step"] for path in (*each.best_k_models, each.last_model_path)}
        for each in ended
    )
    assert now == later
    assert len(now) == 3
    for each in (False, True):
        assert {path.name for path in (tmp_path / str(each)).iterdir()} == {*now}


class Logged(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own_loss", loss)
        return loss


def test_a_save_of_a_hook_is_there_when_it_returns_and_the_end_of_a_fit_waits(tmp_path: Path) -> None:
    steps: list[int] = []

    def save(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in (5, 9):
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            steps.append(load(tmp_path / "own.ckpt")["global_step"])

    def best(trainer: L.Trainer, *_: Any) -> None:
        steps.append(load(Path(trainer.checkpoint_callback.best_model_path))["global_step"])

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.05)
            super().save_checkpoint(*args, **kwargs)

    hooks = LambdaCallback(on_train_batch_end=save, on_train_end=best)
    run = train(tmp_path / "run", True, hooks, io=Slow())
    assert steps == [5, 9, 16]
    run.save_checkpoint(tmp_path / "after.ckpt")
    assert load(tmp_path / "after.ckpt")["global_step"] == 18
    assert not [one for one in threading.enumerate() if one.name.startswith("lightning_tricks_save")]


def fails(folder: Path, full_at: int, **checkpoint: Any) -> tuple[int, str, list[str]]:
    """Where a training raises whose disk is full at a step, what it says, and what is left."""
    run: list[L.Trainer] = []
    walls = [full_disk()]

    def fill(trainer: L.Trainer, *_: Any) -> None:
        run[:] = [trainer]
        if trainer.global_step == full_at:
            until(lambda: (folder / f"step={full_at - 2}.ckpt").exists(), 20)
            walls[0].__enter__()

    try:
        with pytest.raises(OSError, match="was not saved") as caught:
            train(folder, True, LambdaCallback(on_train_batch_end=fill), checkpoint=checkpoint)
    finally:
        walls[0].__exit__(None, None, None)
    assert run[0].global_step > full_at
    return run[0].global_step, str(caught.value), sorted(path.name for path in folder.iterdir())


def on_a_full_disk(folder: str) -> None:
    step, said, left = fails(Path(folder) / "next", 6, save_top_k=1)
    # At the next save, and the older checkpoint was not removed.
    assert (step, left) == (12, ["step=4.ckpt"]), (step, left, said)
    assert "step=8.ckpt was not saved (" in said
    step, said, left = fails(Path(folder) / "end", 14, save_top_k=1, save_last="link")
    assert (step, left) == (18, ["last.ckpt", "step=12.ckpt"])
    assert load(Path(folder) / "end" / "last.ckpt")["global_step"] == 12
    assert "step=16.ckpt was not saved (" in said


def test_an_error_of_a_write_is_raised_by_the_next_save_or_at_the_end(tmp_path: Path) -> None:
    run_alone(on_a_full_disk, str(tmp_path))


def test_an_interrupted_fit_ends_what_it_has_begun_to_write(tmp_path: Path) -> None:
    def stop(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("enough")

    io = SlowIO()
    with pytest.raises(RuntimeError, match="enough"):
        train(tmp_path, True, io.follows, LambdaCallback(on_train_batch_end=stop), io=io)
    assert load(tmp_path / "step=4.ckpt")["global_step"] == 4


class Uploads(CSVLogger):
    """Reads checkpoints, as loggers of services do."""

    def __init__(self, folder: Path, log_model: Any) -> None:
        super().__init__(folder)
        self._log_model = log_model


class Reads(CSVLogger):
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        load(Path(checkpoint_callback.best_model_path))


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="got the plugin AsyncCheckpointIO"):
        train(tmp_path, True, io=AsyncCheckpointIO())
    for log_model in ("all", True):
        with pytest.raises(MisconfigurationException, match="Uploads uploads every checkpoint as soon as"):
            train(tmp_path, True, logger=Uploads(tmp_path, log_model))
    with pytest.raises(MisconfigurationException, match="Reads uploads every checkpoint as soon as"):
        train(tmp_path, True, logger=Reads(tmp_path))
    train(tmp_path / "a", True, logger=Uploads(tmp_path / "b", True), checkpoint={"save_top_k": 1}, log_every_n_steps=1)
    with pytest.raises(TypeError, match="async_save must be"):
        lt.preset("ddp_bf16", async_save=1)
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match=r"async_save=True .* got a ZeRO preset"):
        lt.preset("zero3_bf16", async_save=True)


# -- two processes ----------------------------------------------------------------------------------------------------


def slow_folders(steps: list[int]) -> Any:
    """Shards take two steps."""
    plain = FileSystemWriter.write_data

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = steps[0]
        until(lambda: steps[0] >= begun + 2)
        steps.append(steps[0] - begun)
        return plain(self, *args, **kwargs)

    return mock.patch.object(FileSystemWriter, "write_data", write)


def contents(path: Path) -> dict[str, Any]:
    """What a checkpoint has; metadata of torch have a random number."""
    if path.is_file():
        return state(load(path))
    shards = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*.distcp"))}
    rest = load(path / "meta.pt")
    return {**shards, **{name: rest[name] for name in ("lr_schedulers", "global_step", "loops")}}


def saved_by_two(folder: str, engine: str, preset: dict[str, Any]) -> list[int]:
    io, steps = SlowIO(), [0]
    follow = LambdaCallback(on_train_batch_end=lambda trainer, *_: steps.__setitem__(0, trainer.global_step))
    root = Path(folder)
    train(root / "now", False, engine=engine, preset=preset)
    if engine == "ddp_bf16" or preset:
        run = train(root / "later", True, io.follows, engine=engine, preset=preset, io=io)
    else:
        with slow_folders(steps):
            run = train(root / "later", True, follow, engine=engine, preset=preset)
    paths = sorted((root / "now").iterdir())
    assert [path.name for path in paths] == sorted(path.name for path in (root / "later").iterdir())
    assert len(paths) == 4
    for path in paths:
        now, later = contents(path), contents(root / "later" / path.name)
        assert now.keys() == later.keys()
        assert [key for key in now if isinstance(now[key], bytes) and now[key] != later[key]] == []
        assert not differences(
            *({key: value for key, value in each.items() if not isinstance(value, bytes)} for each in (now, later))
        )
    run.strategy.barrier()
    return io.trained or steps[1:]


FILE = {"save_distributed_checkpoint": False}


@pytest.mark.parametrize(
    ("engine", "preset"),
    [
        pytest.param("fsdp2_bf16", {}),
        pytest.param("ddp_bf16", {}, marks=pytest.mark.slow),
        pytest.param("fsdp2_bf16", FILE, marks=pytest.mark.slow),
    ],
)
def test_two_processes_save_the_state_of_that_moment(engine: str, preset: dict[str, Any], tmp_path: Path) -> None:
    first, _ = run_ranks(saved_by_two, str(tmp_path), engine, preset)
    assert sum(steps >= 2 for steps in first) >= 3


def full_for_one(folder: str, engine: str) -> str:
    rank, wall = int(os.environ["RANK"]), full_disk()
    fills = rank == (engine != "ddp_bf16")  # a file is written by the first

    def fill(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 6 and fills:
            until(lambda: (Path(folder) / "step=4.ckpt").exists(), 20)
            wall.__enter__()

    with pytest.raises(OSError, match="was not saved") as caught:
        train(Path(folder), True, LambdaCallback(on_train_batch_end=fill), engine=engine, checkpoint={"save_top_k": 1})
    if fills:
        wall.__exit__(None, None, None)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp_bf16", "fsdp2_bf16"])
def test_all_processes_raise_what_one_could_not_write(engine: str, tmp_path: Path) -> None:
    said = run_ranks(full_for_one, str(tmp_path), engine)
    assert any("step=8.ckpt was not saved" in each for each in said)
    assert [path.name for path in tmp_path.iterdir()] == ["step=4.ckpt"]


def test_a_strategy_is_copied_without_what_it_writes() -> None:
    import pickle

    strategy = lt.preset("single_bf16", async_save=True)["strategy"]
    assert pickle.loads(pickle.dumps(strategy)).async_save
