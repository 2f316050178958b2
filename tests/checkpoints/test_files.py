"""Reading: damaged and hostile files. Writing: whole or not at all."""

from __future__ import annotations

import os
import pathlib
import random
import resource
import signal
import stat
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_tricks.checkpoints import files
from tests.ranks import run_ranks

STATE = {"weight": torch.arange(3000.0).reshape(50, 60), "steps": torch.tensor(7)}


def hostile(mark: Path) -> Any:
    class Hostile:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.system, (f"touch {mark}",)

    return Hostile()


def refused(file: Path) -> str:
    """The error that loading the file must raise: one line, with the file's name."""
    with pytest.raises(ValueError, match=file.name) as caught:
        files.load(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_torch_files_and_safetensors_are_mapped(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    save_file(STATE, tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        loaded = files.load(tmp_path / name)
        torch.testing.assert_close(loaded, STATE, rtol=0, atol=0)
        maps = Path("/proc/self/maps").read_text()
        assert str(tmp_path / name) in maps


def test_the_old_format_of_torch_is_read(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.testing.assert_close(files.load(tmp_path / "old.pth"), STATE, rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.0003, 0.01, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_a_file_that_was_cut_short_is_refused(kind: str, share: float, tmp_path: Path) -> None:
    file = tmp_path / ("cut.safetensors" if kind == "safetensors" else "cut.ckpt")
    if kind == "safetensors":
        save_file(STATE, file)
    else:
        torch.save(STATE, file, _use_new_zipfile_serialization=kind == "zip")
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    refused(file)


def test_a_flipped_bit_is_refused_wherever_it_matters(tmp_path: Path) -> None:
    file = tmp_path / "flipped.ckpt"
    torch.save(STATE, file)
    content, generator, messages = file.read_bytes(), random.Random(0), []
    for place in [
        *range(0, 300),
        *generator.sample(range(300, len(content)), 300),
        *range(len(content) - 100, len(content)),
    ]:
        file.write_bytes(
            content[:place] + bytes([content[place] ^ (1 << generator.randrange(8))]) + content[place + 1 :]
        )
        try:
            loaded = files.load(file)
        except ValueError as error:
            messages.append(str(error))
        else:  # padding between the records
            torch.testing.assert_close(loaded, STATE, rtol=0, atol=0)
    assert len(messages) > 400
    assert all("flipped.ckpt" in message and "\n" not in message for message in messages)


def test_damaged_values_are_found_by_their_checksum(tmp_path: Path) -> None:
    file = tmp_path / "flipped.ckpt"
    torch.save(STATE, file)
    with zipfile.ZipFile(file) as archive:
        record = next(each for each in archive.infolist() if each.file_size == STATE["weight"].nbytes)
    content = bytearray(file.read_bytes())
    content[record.header_offset + 500] ^= 4
    file.write_bytes(content)
    assert torch.load(file)["weight"].shape == (50, 60), "torch does not notice"
    assert "damaged: the checksum of" in refused(file)


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.testing.assert_close(files.load(tmp_path / "a.pt"), STATE, rtol=0, atol=0)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_run(zipped: bool, tmp_path: Path) -> None:
    file, mark = tmp_path / "hostile.ckpt", tmp_path / "was-here"
    torch.save({"state_dict": STATE, "extra": hostile(mark)}, file, _use_new_zipfile_serialization=zipped)
    message = refused(file)
    assert not mark.exists()
    if zipped:
        assert "posix.system" in message
    torch.load(file, weights_only=False)
    assert mark.exists(), "the file is as hostile as the test means it to be"


def test_an_object_that_the_user_allows_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "path.ckpt"
    torch.save({"state_dict": STATE, "hyper_parameters": {"root": pathlib.PurePosixPath("data")}}, file)
    message = refused(file)
    assert f"{pathlib.PurePosixPath.__module__}.PurePosixPath" in message  # "pathlib._local" under Python 3.13
    assert "torch.serialization.add_safe_globals" in message
    with torch.serialization.safe_globals([pathlib.PurePosixPath]):
        assert files.load(file)["hyper_parameters"]["root"].name == "data"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.ckpt").write_text("no checkpoint")
    refused(tmp_path / "note.ckpt")
    with zipfile.ZipFile(tmp_path / "archive.ckpt", "w") as archive:
        archive.writestr("note", "no checkpoint")
    refused(tmp_path / "archive.ckpt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    assert "holds no dictionary" in refused(tmp_path / "list.pt")
    (tmp_path / "note.safetensors").write_text("no checkpoint" * 10)
    refused(tmp_path / "note.safetensors")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*none\.ckpt"):
        files.load(tmp_path / "none.ckpt")
    with pytest.raises(IsADirectoryError, match="lightning-tricks export"):
        files.load(tmp_path)


def test_the_weights_of_something_else_are_not_guessed() -> None:
    assert files.weights_in({"state_dict": STATE, "epoch": 3}, "a") is STATE
    plain: dict[str, Any] = {**STATE, "net._extra_state": {"scale": 1}}
    assert files.weights_in(plain, "a") is plain
    with pytest.raises(ValueError, match=r"fabric.ckpt is neither .* plain state_dict: it has model, optimizer"):
        files.weights_in({"model": STATE, "optimizer": {}}, "fabric.ckpt")


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.pt", "out.ckpt", "out.safetensors"])
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    state = {**STATE, "half": torch.randn(3).bfloat16(), "none": torch.empty(0, 4), "turned": torch.randn(3, 4).T}
    files.save(state, tmp_path / name, force=False)
    torch.testing.assert_close(files.load(tmp_path / name), state, rtol=0, atol=0)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_the_same_weights_give_the_same_file(tmp_path: Path) -> None:
    files.save(STATE, tmp_path / "a.pt", force=False)
    files.save(STATE, tmp_path / "b.pt", force=False)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_others_can_read_it_as_the_umask_says(name: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.save(STATE, tmp_path / name, force=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_tied_weights_stay_tied_where_the_format_can_say_so(tmp_path: Path) -> None:
    weight = torch.randn(40, 50)
    state = {"a": weight, "b": weight, "c": weight[:1], "d": weight.view(-1), "e": weight.T}
    files.save(state, tmp_path / "out.pt", force=False)
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert loaded["c"].untyped_storage().nbytes() == 200
    files.save(state, tmp_path / "out.safetensors", force=False)
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors"), state, rtol=0, atol=0)


def test_a_part_of_a_storage_is_saved_without_the_rest(tmp_path: Path) -> None:
    files.save({"part": torch.zeros(1_000_000)[10:20]}, tmp_path / "out.pt", force=False)
    assert (tmp_path / "out.pt").stat().st_size < 5000


def test_the_versions_of_the_modules_are_kept(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(3).state_dict()
    files.save({"state_dict": state}, tmp_path / "out.ckpt", force=False)
    loaded = files.load(tmp_path / "out.ckpt")["state_dict"]
    assert isinstance(loaded, OrderedDict)
    assert loaded._metadata == state._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]


def test_safetensors_gets_the_weights_of_a_lightning_checkpoint(tmp_path: Path) -> None:
    files.save({"state_dict": STATE, "epoch": 3}, tmp_path / "out.safetensors", force=False)
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors"), STATE, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"scale": 1}, "another value for net._extra_state: write a .pt file"),
        (torch.ones(2).cdouble(), "cannot hold torch.complex128"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        files.save({"net._extra_state": value}, tmp_path / "out.safetensors", force=False)
    assert not list(tmp_path.iterdir())


def test_safetensors_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        files.load(tmp_path / "a.safetensors")
    with pytest.raises(ImportError, match="pip install safetensors"):
        files.check_output(tmp_path / "b.safetensors", force=False)
    files.check_output(tmp_path / "b.pt", force=False)


def test_an_output_that_cannot_be_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_text("old")
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(FileExistsError, match=r"old.pt exists.*force=True"):
        files.check_output(tmp_path / "old.pt", force=False)
    assert files.check_output(tmp_path / "old.pt", force=True) == tmp_path / "old.pt"
    with pytest.raises(ValueError, match=r"must end in .*, got 'model.safetensor'"):
        files.check_output(tmp_path / "model.safetensor", force=False)
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*none"):
        files.check_output(tmp_path / "none" / "a.pt", force=False)
    with pytest.raises(IsADirectoryError, match="choose another name"):
        files.check_output(tmp_path / "folder.ckpt", force=True)


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(state: Any, opened: Any) -> None:
        (tmp_path / "out.pt").write_text("of another process")

    monkeypatch.setattr(torch, "save", meanwhile)
    with pytest.raises(FileExistsError):
        files.save(STATE, tmp_path / "out.pt", force=False)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["of another process"]


@pytest.mark.parametrize(
    "error",
    [
        OSError("No space left on device"),
        KeyboardInterrupt("Ctrl-C"),
        RuntimeError("enforce fail at inline_container.cc"),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: Any, opened: Any) -> None:
        opened.write(b"half of it")
        raise error

    files.save(STATE, tmp_path / "out.pt", force=False)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises((OSError, KeyboardInterrupt), match=str(error)):
        files.save({"weight": torch.ones(1)}, tmp_path / "out.pt", force=True)
    assert [each.name for each in tmp_path.iterdir()] == ["out.pt"]
    torch.testing.assert_close(files.load(tmp_path / "out.pt"), STATE, rtol=0, atol=0)


def save_on_a_full_disk(output: str) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit then fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(OSError, match=r"write|written|large") as caught:
        files.save({"weight": torch.ones(1_000_000)}, output, force=True)
    return str(caught.value)


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_a_full_disk_is_an_oserror_and_the_old_file_stays(name: str, tmp_path: Path) -> None:
    files.save(STATE, tmp_path / name, force=False)
    (message,) = run_ranks(save_on_a_full_disk, str(tmp_path / name), nprocs=1)
    assert "\n" not in message
    assert [each.name for each in tmp_path.iterdir()] == [name]
    torch.testing.assert_close(files.load(tmp_path / name), STATE, rtol=0, atol=0)


def save_and_be_killed(output: str) -> None:
    original = torch.save

    def save(state: Any, opened: Any) -> None:
        original(state, opened)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save
    files.save({"weight": torch.ones(1_000_000)}, output, force=True)


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    files.save(STATE, tmp_path / "out.pt", force=False)
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(save_and_be_killed, str(tmp_path / "out.pt"), nprocs=1)
    torch.testing.assert_close(files.load(tmp_path / "out.pt"), STATE, rtol=0, atol=0)


def test_identity_tells_ties_from_equal_values_and_parts() -> None:
    weight = torch.zeros(4, 4)
    other: list[Tensor] = [torch.zeros(4, 4), weight[:2], weight.view(16), weight.view(torch.int32), weight.T]
    assert files.identity(weight) == files.identity(weight.detach()) == files.identity(weight.view(4, 4))
    assert all(files.identity(each) != files.identity(weight) for each in other)
    assert files.identity(torch.empty(0)) != files.identity(torch.empty(0, 1))


def test_no_tie_is_found_where_torch_tells_no_memory() -> None:
    weight, other = torch.zeros(4, device="meta"), torch.zeros(4, device="meta")  # as of each tensor on XLA
    assert weight.data_ptr() == other.data_ptr() == 0
    assert files.identity(weight) == files.identity(weight) != files.identity(other)
