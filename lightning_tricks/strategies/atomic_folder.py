"""Sharded checkpoints, which are folders, saved whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import saves_folder
from lightning_tricks.core.safe_load.damage import unfinished

_GONE = re.compile(r"\.[0-9a-f]{8}\.removing")
_SWAP = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD: paths are as for open()


def hidden(path: Path, token: str, role: str) -> Path:
    """A name beside ``path`` that no pattern such as ``*.ckpt`` finds."""
    return path.with_name(f".{path.name}.{token}.{role}")


def put_in_place(new: Path, final: Path) -> None:
    """Give a finished folder its final name and remove what had that.

    Linux swaps two names in one step on its local file systems; elsewhere the old folder waits under a hidden name for
    an instant, from which ``restore`` brings it back.
    """
    old = new
    if not os.path.lexists(final):
        new.rename(final)
    elif not _exchange(new, final):
        old = hidden(final, secrets.token_hex(4), "old")
        final.rename(old)
        try:
            new.rename(final)
        except OSError:
            old.rename(final)
            raise
    sync(final.parent)
    if os.path.lexists(old):
        discard(old)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where that cannot be done, and nothing has changed."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _SWAP) == 0


def discard(path: Path) -> None:
    """Remove a folder, a file or a link, of which not even for an instant a half has that name."""
    gone = path.with_name(f".{secrets.token_hex(4)}.removing")
    path.rename(gone)
    _remove(gone)


def restore(final: Path) -> None:
    """Give the old folder its name back if a process was killed in ``put_in_place`` before the new one had it."""
    if not os.path.lexists(final):
        for old in _left(final, "old"):
            old.rename(final)
            return


def sweep(final: Path) -> None:
    """Remove what killed processes have left of saving that name, and of removing any."""
    restore(final)
    for left in [*_left(final, "saving"), *_left(final, "old")]:
        _remove(left)
    for left in _siblings(final, _GONE):
        _remove(left)


def sync(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    with contextlib.suppress(OSError):  # not every file system can do that with a folder
        _fsync(folder)


def sync_all(folder: Path) -> None:
    """Return when all that is in a folder is on the disk, whichever process of this machine wrote it."""
    for parent, _, files in os.walk(folder):
        for file in files:
            _fsync(Path(parent, file))
        sync(Path(parent))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _left(final: Path, role: str) -> list[Path]:
    return _siblings(final, re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{8}}\.{role}"))


def _siblings(final: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(p for p in final.parent.iterdir() if pattern.fullmatch(p.name)) if final.parent.is_dir() else []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # what stays is hidden, and tried again by the next save
    else:
        path.unlink(missing_ok=True)


class AtomicFolders(ParallelStrategy):
    """Base of a strategy whose checkpoints are folders: one with its final name is always whole.

    The ranks write to a hidden folder beside it. When all have finished and the files are on the disk, rank 0 swaps the
    names. So a process that is killed, or a full disk, leaves the checkpoint that had the name before, and nothing that
    ``ckpt_path="last"`` or ``*.ckpt`` finds; what it does leave is removed when that name is saved again. While one is
    saved the disk, which must be the same for all ranks, holds both. If one rank fails to write, all raise.

    What is saved as one file by rank 0 is saved as Lightning does.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        assert self.lightning_module is not None
        if not saves_folder(self.lightning_module.trainer) or storage_options is not None:  # which Lightning refuses
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = _local(self.broadcast(filepath))
        new = hidden(path, self.broadcast(secrets.token_hex(4)), "saving")
        try:
            self._on_zero(partial(_make, new, path), path)
            self._agree(_attempt(partial(_require, new)), path)
            self._agree(self._write(checkpoint, new), path)
            self._agree(_attempt(partial(sync_all, new)) if self.local_rank == 0 else None, path)
            self._on_zero(partial(put_in_place, new, path), path)
        except OSError:
            if self.is_global_zero:
                shutil.rmtree(new, ignore_errors=True)
            raise

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self.require_whole(Path(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def require_whole(self, path: Path) -> None:
        """Raise for a folder that was not saved to its end; first its name is given back to one that had lost it."""
        if self.is_global_zero:
            with contextlib.suppress(OSError):  # what is not there is an error below
                restore(Path(os.path.realpath(path)))  # to which last.ckpt may be a link
        self.barrier("AtomicFolders.load_checkpoint")
        if path.is_dir() and (wrong := unfinished(path)):
            raise MisconfigurationException(f"{path} is no whole checkpoint: {wrong}. Resume from another one.")

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        path = Path(filepath)
        if not path.is_dir() or path.is_symlink():
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            discard(path)

    def _write(self, checkpoint: dict[str, Any], folder: Path) -> BaseException | None:
        """Save as Lightning does; the error of this rank, on which the others are not waiting."""
        if isinstance(self, DeepSpeedStrategy):
            return _hold(self.deepspeed_engine.checkpoint_engine, partial(super().save_checkpoint, checkpoint, folder))
        return _attempt(partial(super().save_checkpoint, checkpoint, folder))  # of FSDP2 all ranks hear

    def _on_zero(self, action: Callable[[], None], path: Path) -> None:
        self._agree(_attempt(action) if self.is_global_zero else None, path)

    def _agree(self, error: BaseException | None, path: Path) -> None:
        """Raise on all ranks if there is an error on one."""
        if self.reduce_boolean_decision(error is None):
            return
        first = f"{type(error).__name__}: {error}".strip().splitlines()[0] if error else "another rank failed"
        raise OSError(f"{path} was not saved ({first}). What had that name is as it was.") from error


def _local(filepath: str | Path) -> Path:
    if "://" in str(filepath):
        raise ValueError(
            f"a sharded checkpoint is a folder on a disk that all ranks see, got {str(filepath)!r}: save to such a disk"
            " and copy the folder, or save one file."
        )
    return Path(filepath)


def _make(new: Path, final: Path) -> None:
    sweep(final)
    new.mkdir(parents=True)


def _require(new: Path) -> None:
    if not new.is_dir():
        raise FileNotFoundError(f"rank 0 has made {new}, which this rank does not see: all need the same disk")


def _attempt(action: Callable[[], None]) -> BaseException | None:
    try:
        action()
    except (Exception, CheckpointException) as error:  # the latter, of torch's writer, is no Exception
        return error
    return None


def _hold(writer: Any, action: Callable[[], None]) -> BaseException | None:
    """Do it, and give the first error of its writer at the end, since until then DeepSpeed's other ranks wait for this.

    What was half written goes at once: the small files that DeepSpeed still writes shall find space on a full disk. If
    they do not, the error is raised on this rank alone; the others end with it, as without this class.
    """
    errors: list[BaseException] = []

    def save(original: Callable[..., Any], state_dict: Any, path: str) -> None:
        if error := _attempt(partial(original, state_dict, path)):
            errors.append(error)
            Path(path).unlink(missing_ok=True)

    undo = wrap_method(writer, "save", save)
    try:
        action()
    finally:
        undo()
    return errors[0] if errors else None
