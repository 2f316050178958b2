"""A checkpoint that would run code when it is read is refused by every reader, and nothing of it runs."""

from __future__ import annotations

import ast
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_tricks as lt
from lightning_tricks.checkpoints import average_checkpoints, consolidate, export_weights, greedy_soup
from lightning_tricks.core.safe_load.metadata import ALLOWED_NAMES
from lightning_tricks_cli.main import main
from tests.checkpoints.sharded import Tied, save_zero3
from tests.faults import hostile
from tests.faults.pickles import CRAFTED, behind, state_of
from tests.faults.runs import resume
from tests.few import few
from tests.nets import PlainNet, build, rank_loader, trainer
from tests.ranks import run_ranks

PACKAGE = Path(lt.__file__).parent


class Hostile:
    """Makes a file as soon as it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.mark}",)


def by_the_cli(*arguments: Any) -> None:
    """The command, whose one line on standard error is raised here."""
    if main([str(argument) for argument in arguments]):
        raise ValueError("see standard error")


# -- files ------------------------------------------------------------------------------------------------------------

FILE_READERS: dict[str, Callable[[Path, Path], Any]] = {
    "average_checkpoints": lambda file, out: average_checkpoints([file, file], out),
    "greedy_soup": lambda file, out: greedy_soup([file], lambda _: 1.0, out),
    "export_weights": lambda file, out: export_weights(file, out),
    "lightning-tricks average": lambda file, out: by_the_cli("average", file, "-o", out),
    "lightning-tricks export": lambda file, out: by_the_cli("export", file, "-o", out),
    "resume": lambda file, _: resume(file),
}


@pytest.mark.parametrize("place", ["state_dict", "callbacks", "a plain state_dict"])
@pytest.mark.parametrize("old", [False, True], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("reader", FILE_READERS)
def test_a_hostile_file_is_refused(reader: str, old: bool, place: str, tmp_path: Path, capsys: Any) -> None:
    mark, file, out = tmp_path / "mark", tmp_path / "a.ckpt", tmp_path / "out.pt"
    trap = {"w": torch.ones(2), "trap": Hostile(mark)}
    checkpoint = trap if place == "a plain state_dict" else {"state_dict": {"w": torch.ones(2)}, place: trap}
    torch.save(checkpoint, file, _use_new_zipfile_serialization=not old)
    with pytest.raises((ValueError, pickle.UnpicklingError)) as caught:
        FILE_READERS[reader](file, out)
    said = str(caught.value) + capsys.readouterr().err
    assert ("a.ckpt is damaged or not a checkpoint" if old and reader != "resume" else "posix.system") in said
    assert not mark.exists()
    assert not out.exists()


@pytest.mark.parametrize("place", ["state_dict", "callbacks", "global_step"])
def test_the_newest_checkpoint_is_found_without_running_it(place: str, tmp_path: Path) -> None:
    mark, progress = tmp_path / "mark", {"epoch_progress": {"total": {"processed": 1}}}
    checkpoint = {"callbacks": {}, "global_step": 3, "loops": {"fit_loop": progress}, "state_dict": {}}
    torch.save({**checkpoint, place: {"trap": Hostile(mark)}}, tmp_path / "a.ckpt")
    assert lt.newest_checkpoint(tmp_path) == str(tmp_path / "a.ckpt")
    assert not mark.exists()


# -- folders ----------------------------------------------------------------------------------------------------------

FOLDER_READERS: dict[str, Callable[[Path, Path], Any]] = {
    "consolidate": lambda folder, out: consolidate(folder, out),
    "export_weights": lambda folder, out: export_weights(folder, out),
    "lightning-tricks consolidate": lambda folder, out: by_the_cli("consolidate", folder, "-o", out),
    "lightning-tricks export": lambda folder, out: by_the_cli("export", folder, "-o", out),
}


class Extra(PlainNet):
    """With an entry of the state_dict that is no tensor, which torch pickles."""

    def get_extra_state(self) -> dict[str, str]:
        return {"note": "extra"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        assert state == {"note": "extra"}


def fsdp2(folder: str, ckpt_path: str | None = None) -> None:
    strategy = lt.preset("fsdp2_bf16", precision="32-true")
    run = trainer(devices=2, max_epochs=1, use_distributed_sampler=False, callbacks=[lt.EMA(0.5)], **strategy)
    run.fit(build(Extra), rank_loader(), ckpt_path=ckpt_path)
    if ckpt_path is None:
        run.save_checkpoint(folder)


@pytest.fixture(scope="module")
def fsdp2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2") / "a.ckpt"
    run_ranks(fsdp2, str(folder))
    return folder


@pytest.fixture(scope="module")
def zero_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("zero3") / "a.ckpt"
    run_ranks(save_zero3, str(folder))
    return folder


def in_metadata(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))


def in_extra_state(folder: Path, mark: Path) -> None:
    """The value that is no tensor becomes a trap behind the other shards."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if "_extra_state" in index.fqn)
    entry = metadata.storage_data[index]
    with (folder / entry.relative_path).open("ab") as file:
        start = file.tell()
        torch.save(Hostile(mark), file)
        metadata.storage_data[index] = replace(entry, offset=start, length=file.tell() - start)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_meta(folder: Path, mark: Path) -> None:
    torch.save({"trap": Hostile(mark)}, folder / "meta.pt")


def in_averages(folder: Path, mark: Path) -> None:
    in_metadata(next(folder.glob("averages/*")), mark)


def in_states(pattern: str, folder: Path, trap: object) -> None:
    file = next(folder.glob(pattern))
    torch.save({**torch.load(file, weights_only=False), "trap": trap}, file)


@pytest.mark.parametrize("trap", [in_metadata, in_extra_state], ids=lambda trap: trap.__name__)
@pytest.mark.parametrize("reader", few(FOLDER_READERS, 2))
def test_a_hostile_folder_of_fsdp2_is_refused(
    reader: str, trap: Callable[..., None], fsdp2_folder: Path, tmp_path: Path
) -> None:
    assert_refused(reader, trap, fsdp2_folder, tmp_path)


@pytest.mark.parametrize("pattern", ["*/*model_states.pt", "*/*optim_states.pt"])
@pytest.mark.parametrize("reader", FOLDER_READERS)
def test_a_hostile_folder_of_zero_is_refused(reader: str, pattern: str, zero_folder: Path, tmp_path: Path) -> None:
    assert_refused(reader, lambda copied, mark: in_states(pattern, copied, Hostile(mark)), zero_folder, tmp_path)


def assert_refused(reader: str, trap: Callable[..., None], folder: Path, tmp_path: Path) -> None:
    mark, copied, out = tmp_path / "mark", tmp_path / "a.ckpt", tmp_path / "out.pt"
    shutil.copytree(folder, copied)
    FOLDER_READERS[reader](copied, out)  # while it is not hostile
    out.unlink()
    trap(copied, mark)
    with pytest.raises(ValueError, match=r"run code|see standard error"):
        FOLDER_READERS[reader](copied, out)
    assert not mark.exists()
    assert not out.exists()


@pytest.mark.few(10)
@pytest.mark.parametrize("crafted", CRAFTED)
@pytest.mark.parametrize("reader", FOLDER_READERS)
def test_a_folder_that_would_change_a_class_is_refused(
    reader: str, crafted: str, fsdp2_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    copied, out, before = (
        shutil.copytree(fsdp2_folder, tmp_path / "a.ckpt"),
        tmp_path / "out.pt",
        state_of(ALLOWED_NAMES),
    )
    for file in (copied / ".metadata", *copied.glob("averages/*/.metadata")):
        honest = file.read_bytes()
        file.write_bytes(behind(CRAFTED[crafted], honest))
        if "export" in reader or file.parent == copied:
            with pytest.raises(ValueError, match=r"a\.ckpt|see standard error") as caught:
                FOLDER_READERS[reader](copied, out)
            assert re.search(r"\.metadata (is damaged|holds)", str(caught.value) + capsys.readouterr().err)
            assert not out.exists()
        file.write_bytes(honest)
    assert state_of(ALLOWED_NAMES) == before
    FOLDER_READERS[reader](copied, out)


TRAPS = (in_metadata, in_extra_state, in_meta, in_averages)


def in_class(folder: Path, _: Path) -> None:
    file = folder / ".metadata"
    file.write_bytes(behind(CRAFTED["a method of a class"], file.read_bytes()))


def in_class_of_averages(folder: Path, mark: Path) -> None:
    in_class(next(folder.glob("averages/*")), mark)


def cut(folder: Path, _: Path) -> None:
    os.truncate(folder / ".metadata", 300)


def cut_averages(folder: Path, mark: Path) -> None:
    cut(next(folder.glob("averages/*")), mark)


DAMAGES = (in_class, in_class_of_averages, cut, cut_averages)


def refused_by_fsdp2(folder: str) -> list[str]:
    """The errors of resuming from a copy of the folder with each trap in turn; one process group lasts for all."""
    said = []
    fsdp2("", ckpt_path=f"{folder}.untouched")
    before = state_of(ALLOWED_NAMES)
    for trap in (*TRAPS, *DAMAGES):
        copied = Path(f"{folder}.{trap.__name__}")
        with pytest.raises(BaseException) as caught:  # noqa: PT011 (of torch's own)
            fsdp2("", ckpt_path=str(copied))
        said.append(str(caught.value))
    assert state_of(ALLOWED_NAMES) == before
    fsdp2("", ckpt_path=f"{folder}.untouched")
    return said


def test_resuming_from_a_hostile_folder_of_fsdp2_is_refused(fsdp2_folder: Path, tmp_path: Path) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "a.ckpt"
    shutil.copytree(fsdp2_folder, f"{folder}.untouched")
    for trap in (*TRAPS, *DAMAGES):
        copied = Path(f"{folder}.{trap.__name__}")
        shutil.copytree(fsdp2_folder, copied)
        trap(copied, mark)
    for said in run_ranks(refused_by_fsdp2, str(folder)):
        assert len(said) == len(TRAPS) + len(DAMAGES)
        assert all("run code" in each or "weights_only" in each for each in said[: len(TRAPS)]), said
        assert all(".metadata is damaged" in each for each in said[len(TRAPS) :]), said
    assert not mark.exists()


def zero3(ckpt_path: str) -> None:
    strategy = lt.preset("zero3_bf16", precision="32-true")
    run = trainer(devices=2, max_epochs=1, use_distributed_sampler=False, callbacks=[lt.EMA(0.5)], **strategy)
    run.fit(build(Tied), rank_loader(), ckpt_path=ckpt_path)


def refused_by_zero(folder: str) -> list[str]:
    zero3(f"{folder}.untouched")
    said = []
    for number in range(4):
        with pytest.raises(ValueError, match=r"run code|another rank has refused") as caught:
            zero3(f"{folder}.{number}")
        said.append(str(caught.value))
    with torch.serialization.safe_globals([Fraction]):
        zero3(f"{folder}.allowed")
    return said


def test_resuming_from_a_hostile_folder_of_zero_is_refused_on_all_ranks(zero_folder: Path, tmp_path: Path) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "a.ckpt"
    shutil.copytree(zero_folder, f"{folder}.untouched")
    files = [str(file.relative_to(zero_folder)) for file in sorted(zero_folder.glob("*/*_states.pt"))]
    assert len(files) == 4  # two of each rank
    for number, file in enumerate(files):
        shutil.copytree(zero_folder, f"{folder}.{number}")
        in_states(file, Path(f"{folder}.{number}"), Hostile(mark))
    in_states(files[0], shutil.copytree(zero_folder, Path(f"{folder}.allowed")), Fraction(1, 2))
    for of_both in zip(*run_ranks(refused_by_zero, str(folder)), strict=True):
        assert sorted("posix.system" in said for said in of_both) == [False, True]
    assert not mark.exists()


# -- the source -------------------------------------------------------------------------------------------------------


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


SOURCES = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "lightning_tricks_cli").rglob("*.py")]


def test_the_package_unpickles_nothing() -> None:
    """``torch.load`` has ``weights_only=True`` or what Lightning was told; no other reader of pickles is called."""
    readers = ("pickle.load", "pickle.loads", "torch.jit.load", "torch.distributed.checkpoint.load", "dcp.load")
    for file in SOURCES:
        for call in calls(ast.parse(file.read_text())):
            name, place = ast.unparse(call.func), file.relative_to(PACKAGE.parent).as_posix()
            if name == "torch.load":
                given = {each.arg: ast.unparse(each.value) for each in call.keywords}
                told = ("True", "weights_only") if place.endswith("strategies/fsdp2/sharded.py") else ("True",)
                assert given.get("weights_only") in told, ast.unparse(call)
            assert name not in readers or place.endswith("core/safe_load/reader.py"), ast.unparse(call)
            assert name != "dcp.FileSystemReader", "SafeReader reads its metadata without running it"
            assert not name.endswith("load_from_checkpoint") or place.endswith("evaluation/ensemble.py"), (
                "restored() makes a module of values alone"
            )


def test_only_what_a_run_has_written_itself_is_trusted() -> None:
    given = ("'weights_only': False", "weights_only=False")
    trusting = []
    for file in SOURCES:
        nodes = [each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.Dict | ast.keyword)]
        if any(word in ast.unparse(node) for node in nodes for word in given):
            trusting.append(file.relative_to(PACKAGE.parent).as_posix())
    assert sorted(trusting) == ["lightning_tricks/evaluation/compare.py", "lightning_tricks/evaluation/fold_runs.py"]


@pytest.mark.parametrize("preset", ["single_bf16", "fsdp2_bf16"])
def test_a_preset_runs_no_program_whatever_it_was_told(preset: str, tmp_path: Path) -> None:
    path = hostile.program(tmp_path / "a", tmp_path / "mark")
    (said,) = run_ranks(resumed_from_a_program, preset, str(path), nprocs=1)
    assert "a.ckpt was not read: it is a program (TorchScript) and no checkpoint." in said
    assert not (tmp_path / "mark").exists()


def resumed_from_a_program(name: str, path: str) -> str:
    run = trainer(max_epochs=1, **lt.preset(name, precision="32-true"))
    with pytest.raises(ValueError, match="program") as caught:
        run.fit(build(PlainNet), rank_loader(), ckpt_path=path, weights_only=False)
    return str(caught.value)
