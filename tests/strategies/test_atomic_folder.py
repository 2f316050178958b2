"""A folder with a checkpoint's name is whole, whatever happens while it is saved."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from lightning_tricks.core.safe_load import atomic_folder as folders
from lightning_tricks.core.safe_load.atomic_folder import discard, put_in_place, restore, sweep
from lightning_tricks.core.safe_load.own_folder import MARKER, mark
from lightning_tricks.strategies import atomic_folder as strategies
from lightning_tricks.strategies.atomic_folder import AtomicFolders
from tests.conformance.engines import CPUDeepSpeedStrategy, cpu_deepspeed
from tests.nets import PlainNet, assert_equal, build, rank_loader, trainer
from tests.ranks import run_ranks

# -- names ------------------------------------------------------------------------------------------------------------


def make(folder: Path, content: str) -> Path:
    for name in ("a", "b/c"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def whole(folder: Path) -> str:
    """What is in a folder that ``make`` made."""
    contents = {(folder / name).read_text() for name in ("a", "b/c")}
    assert len(contents) == 1
    return contents.pop()


@pytest.fixture(params=["swap", "two renames"])
def _names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renames":
        monkeypatch.setattr(folders, "_exchange", lambda a, b: False)


def test_two_names_are_swapped_here_in_one_step(tmp_path: Path) -> None:
    make(tmp_path / "a", "A")
    (tmp_path / "b").write_text("B")
    assert folders._exchange(tmp_path / "a", tmp_path / "b")
    assert (whole(tmp_path / "b"), (tmp_path / "a").read_text()) == ("A", "B")
    assert not folders._exchange(tmp_path / "a", tmp_path / "none")


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize("before", ["nothing", "folder", "file", "link"])
def test_a_new_folder_takes_the_place_of_whatever_was_there(before: str, tmp_path: Path) -> None:
    final, other = tmp_path / "a.ckpt", make(tmp_path / "other.ckpt", "other")
    if before == "folder":
        make(final, "old")
    elif before == "file":
        final.write_text("old")
    elif before == "link":
        final.symlink_to(other.name)
    put_in_place(make(tmp_path / ".new", "new"), final)
    assert whole(final) == "new"
    assert not final.is_symlink()
    assert not (other / MARKER).exists()
    assert whole(other) == "other"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "other.ckpt"]


class Killed(BaseException):
    """Comes instead of a SIGKILL: nothing catches it."""


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the call of that number that changes names raise, before or after it does."""
    calls = [0]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == step:
                raise Killed
            result = original(*args, **kwargs)
            calls[0] += 1
            if calls[0] == step:
                raise Killed
            return result

        return call

    for owner, name in ((os, "rename"), (os, "unlink"), (os, "rmdir"), (folders, "_exchange")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize("step", range(1, 40))
def test_killed_at_each_step_the_name_stands_for_the_old_or_the_new_folder(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = make(tmp_path / "a.ckpt", "old")
    new = make(folders.hidden(final, "01234567", "saving"), "new")
    mark(new, "checkpoint")
    with monkeypatch.context() as patch:
        kill_at(step, patch)
        try:
            put_in_place(new, final)
        except Killed:
            assert step < 25
        else:
            assert step > 10
    assert all(name == "a.ckpt" or name.startswith(".") for name in os.listdir(tmp_path))
    restore(final)
    assert whole(final) in ("old", "new")
    sweep(final)
    assert left(tmp_path) == {"a.ckpt"}


def left(folder: Path) -> set[str]:
    """What is in a folder, without a hidden one that has lost its marker and was to be removed in the next instant."""
    return {path.name for path in folder.iterdir() if any(path.iterdir()) or not path.name.endswith(".removing")}


@pytest.mark.parametrize("step", range(1, 14))
def test_killed_while_it_is_removed_a_folder_is_whole_or_has_no_name(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "a.ckpt", "old")
    with monkeypatch.context() as patch:
        kill_at(step, patch)
        try:
            discard(folder)
        except Killed:
            assert step < 13
    assert not folder.exists() or whole(folder) == "old"
    sweep(tmp_path / "b.ckpt")
    assert left(tmp_path) <= {"a.ckpt"}


def test_a_new_name_that_cannot_be_given_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda a, b: False)
    final = make(tmp_path / "a.ckpt", "old")
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "none", final)
    assert whole(final) == "old"


def test_only_what_was_left_of_that_name_is_swept(tmp_path: Path) -> None:
    kept = [".a.ckpt", ".a.ckpt.b.01234567.saving", ".b.ckpt.01234567.saving", ".a.ckpt.0123.saving", "a.ckpt.saving"]
    left = [".a.ckpt.01234567.saving", ".a.ckpt.89abcdef.saving", ".89abcdef.removing", ".a.ckpt.01234567.old"]
    for name in (*kept, *left):
        mark(make(tmp_path / name, name), "checkpoint")
    make(tmp_path / "a.ckpt", "whole")
    sweep(tmp_path / "a.ckpt")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "a.ckpt"])
    sweep(tmp_path / "none" / "a.ckpt")


def test_what_others_have_made_with_such_names_is_left_alone(tmp_path: Path) -> None:
    outside = mark(make(tmp_path / "outside", "other"), "checkpoint")
    names = [".a.ckpt.01234567.saving", ".a.ckpt.01234567.old", ".89abcdef.removing"]
    for number, name in enumerate(names):
        make(tmp_path / name, name)
        (tmp_path / name.replace("89ab", "cdef").replace("0123", "cdef")).symlink_to(outside)
        (tmp_path / name.replace("89ab", "4567").replace("0123", "89ab")).write_text(str(number))
    before = sorted(os.listdir(tmp_path))
    assert len(before) == 10
    sweep(tmp_path / "a.ckpt")
    assert sorted(os.listdir(tmp_path)) == before
    assert [whole(tmp_path / name) for name in names] == names
    assert whole(outside) == "other"


# -- strategies -------------------------------------------------------------------------------------------------------


class FSDP2(AtomicFolders, ModelParallelStrategy):
    pass


class ZeRO(AtomicFolders, CPUDeepSpeedStrategy):
    pass


class Wide(PlainNet):
    """Large enough for a file to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8192), nn.Tanh(), nn.Linear(8192, 2))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def strategy(engine: str, **settings: Any) -> Any:
    if engine == "fsdp2":
        return FSDP2(2, 1, **settings)
    made = cpu_deepspeed(int(engine[-1]), **settings)
    made.__class__ = ZeRO
    return made


def make_trainer(engine: str, *callbacks: Any, strategy_settings: Any = None, **settings: Any) -> Any:
    return trainer(
        strategy=strategy(engine, **(strategy_settings or {})),
        devices=2,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **{"max_epochs": 1, **settings},
    )


def local_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's parts."""
    parts = {name: getattr(value, "ds_tensor", value.detach()) for name, value in module.named_parameters()}
    return {n: (p.to_local() if isinstance(p, DTensor) else p).clone() for n, p in parts.items()}


def names_and_resume(engine: str, folder: str) -> None:
    """Saved by ModelCheckpoint with a link, and resumed from it: nothing else is left in the folder."""
    module, path = build(Wide), Path(folder)
    checkpoints = ModelCheckpoint(
        path, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max", save_last="link"
    )
    run = make_trainer(engine, lt.EMA(decay=0.5), checkpoints, enable_checkpointing=True)
    named = folders.put_in_place

    def complete(new: Path, final: Path) -> None:
        assert list(new.glob("averages/EMA*/.metadata"))
        named(new, final)

    with mock.patch.object(strategies, "put_in_place", complete):
        run.fit(module, rank_loader())
    run.strategy.barrier()
    assert sorted(os.listdir(path)) == ["last.ckpt", "step=3.ckpt"]
    assert (path / "last.ckpt").is_symlink()
    run.strategy.barrier()
    if run.is_global_zero:  # as if killed between two renames
        (path / "step=3.ckpt").rename(folders.hidden(path / "step=3.ckpt", "01234567", "old"))
    run.strategy.barrier()
    saved, again = local_weights(module), build(Wide)
    make_trainer(engine, lt.EMA(decay=0.5)).fit(again, rank_loader(), ckpt_path=path / "last.ckpt")
    assert_equal(local_weights(again), saved)
    run.strategy.barrier()
    if run.is_global_zero:
        shutil.rmtree(path / "step=3.ckpt" / "averages")  # as of a stock strategy that was killed before the averages
    run.strategy.barrier()
    with pytest.raises(MisconfigurationException, match=r"averages of this checkpoint are in shards in .*step=3"):
        make_trainer(engine, lt.EMA(decay=0.5)).fit(build(Wide), rank_loader(), ckpt_path=path / "step=3.ckpt")
    run.strategy.barrier()
    if run.is_global_zero:
        missing = "meta.pt" if engine == "fsdp2" else "latest"
        (path / "step=3.ckpt" / missing).unlink()
    run.strategy.barrier()
    with pytest.raises(MisconfigurationException, match=r"step=3\.ckpt is not a complete checkpoint: it has no"):
        make_trainer(engine).fit(build(Wide), rank_loader(), ckpt_path=path / "step=3.ckpt")


def lose_and_break(name: str, folder: str) -> str:
    """A preset finds the folder of a process that was killed between two renames, and refuses one without an end."""
    path, preset = Path(folder) / "a.ckpt", lt.preset(name, precision="32-true")
    run = trainer(devices=2, use_distributed_sampler=False, **preset)
    run.fit(build(PlainNet), rank_loader())
    run.save_checkpoint(path)
    if run.is_global_zero:
        path.rename(folders.hidden(path, "01234567", "old"))
    run.strategy.barrier()
    settings = {"devices": 2, "max_epochs": 3, "use_distributed_sampler": False}
    resumed = trainer(**settings, **lt.preset(name, precision="32-true"))
    resumed.fit(build(PlainNet), rank_loader(), ckpt_path=path)
    assert resumed.global_step == 9
    if run.is_global_zero:
        (path / ("meta.pt" if name.startswith("fsdp2") else "latest")).unlink()
    run.strategy.barrier()
    try:
        trainer(**settings, **lt.preset(name, precision="32-true")).fit(build(PlainNet), rank_loader(), ckpt_path=path)
    except MisconfigurationException as error:
        return str(error)
    return "resumed"


@pytest.mark.parametrize("name", ["fsdp2_bf16", "zero3_bf16"])
def test_presets_resume_whole_folders_only(name: str, tmp_path: Path) -> None:
    for told in run_ranks(lose_and_break, name, str(tmp_path)):
        assert "is not a complete checkpoint: it has no" in told


def full_disk(engine: str, folder: str) -> list[str]:
    """The disk is full for one rank, then for the other: both raise, and the old checkpoint stays."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit then fails as on a full disk
    module, path = build(Wide), Path(folder) / "a.ckpt"
    run = make_trainer(engine)
    run.fit(module, rank_loader())
    path.parent.mkdir(exist_ok=True)
    if run.is_global_zero:
        path.write_text("an old file")
    run.save_checkpoint(path)
    before, messages = sorted(path.rglob("*")), []
    for rank in (0, 1):
        if run.global_rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"a\.ckpt was not saved") as caught:
            run.save_checkpoint(path)
        messages.append(str(caught.value))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert sorted(path.rglob("*")) == before
        run.strategy.barrier()
        assert os.listdir(path.parent) == ["a.ckpt"]
    run.save_checkpoint(path)
    mine = path.with_name("mine.ckpt")  # a folder of the user, who has named it by mistake
    if run.is_global_zero:
        mine.mkdir()
        (mine / "thesis.tex").touch()
    run.strategy.barrier()
    with pytest.raises(OSError, match=r"mine\.ckpt was not saved"):
        run.save_checkpoint(mine)
    with pytest.warns(UserWarning, match=r"mine\.ckpt is not removed") if run.is_global_zero else nullcontext():
        run.strategy.remove_checkpoint(mine)
    assert os.listdir(mine) == ["thesis.tex"]
    run.strategy.barrier()
    if run.is_global_zero:
        shutil.rmtree(mine)
    run.strategy.barrier()
    run.fit_loop.max_epochs = 2
    run.fit(build(Wide), rank_loader(), ckpt_path=path)
    assert run.global_step == 6
    with pytest.raises(ValueError, match=r"folder on a disk that all ranks see, got .memory://a/b\.ckpt"):
        run.save_checkpoint("memory://a/b.ckpt")
    os.chdir(path.parent)  # to which the name is relative, and one that the other rank does not see
    if not run.is_global_zero:
        os.chdir("/")
    with pytest.raises(OSError, match=r"b\.ckpt was not saved"):
        run.save_checkpoint("b.ckpt")
    run.strategy.barrier()
    assert os.listdir(path.parent) == ["a.ckpt"]
    return messages


def all_of_it(folder: str) -> dict[str, list[str]]:
    found = {}
    for engine in ("fsdp2", "zero1", "zero3"):
        names_and_resume(engine, f"{folder}/{engine}")
        found[engine] = full_disk(engine, f"{folder}/{engine}-full")
    one = make_trainer("fsdp2", strategy_settings={"save_distributed_checkpoint": False})
    one.fit(build(Wide), rank_loader())
    one.save_checkpoint(f"{folder}/one/a.ckpt")
    one.strategy.barrier()
    assert Path(folder, "one", "a.ckpt").is_file()
    return found


def test_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(all_of_it, str(tmp_path), timeout=200):
        for messages in found.values():
            assert len(messages) == 2
            assert all("\n" not in message for message in messages)
            assert any("another rank failed" not in message for message in messages)
    assert os.listdir(tmp_path / "one") == ["a.ckpt"]
