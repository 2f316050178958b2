"""Atomic replacement of folders; apart from the strategy, since core/safe_load alone removes files."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from lightning_tricks.core.safe_load.own_folder import is_ours, mark, remove, remove_file

_REMOVED = re.compile(r"\.[0-9a-f]{8}\.removing")
_RENAME_EXCHANGE = 2  # A flag of renameat2.
_AT_FDCWD = -100  # Paths are relative to the working directory.


def hidden(path: Path, token: str, role: str) -> Path:
    """A hidden name beside ``path`` that no pattern such as ``*.ckpt`` matches."""
    return path.with_name(f".{path.name}.{token}.{role}")


def put_in_place(new: Path, final: Path) -> None:
    """Give a finished folder its final name and remove what had that name before.

    On local file systems Linux exchanges two names atomically. Elsewhere the old folder has a hidden name for an
    instant; if the process is killed then, ``restore`` brings it back.
    """
    old = new
    if not os.path.lexists(final):
        new.rename(final)
    else:
        _mark_if_folder(final)
        if not _exchange(new, final):
            old = hidden(final, secrets.token_hex(4), "old")
            final.rename(old)
            try:
                new.rename(final)
            except OSError:
                old.rename(final)
                raise
    sync_folder(final.parent)
    if os.path.lexists(old):
        discard(old)


def put_link(target: Path, link: Path) -> None:
    """Let a relative link to a path take the place of what had its name."""
    new = hidden(link, secrets.token_hex(4), "saving")
    new.symlink_to(os.path.relpath(target, link.parent))
    put_in_place(new, link)


def _mark_if_folder(path: Path) -> bool:
    """Whether this is a folder; it is marked, for ``sweep`` to know it under another name, unless the disk is full."""
    if path.is_symlink() or not path.is_dir():
        return False
    with suppress(OSError):
        mark(path, "checkpoint")
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names atomically; return False, with nothing changed, where the system cannot."""
    # Python has no call that exchanges two names, and os.replace refuses a folder that is not empty. With two renames
    # a process that is killed between them leaves nothing under the final name, for other programs until `restore`.
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def discard(path: Path) -> None:
    """Remove a folder, a file or a link; its name never stands for a partly removed folder."""
    if not _mark_if_folder(path):
        remove_file(path)
        return
    removed = path.with_name(f".{secrets.token_hex(4)}.removing")
    path.rename(removed)
    remove(removed)


def restore(final: Path) -> None:
    """Rename the old folder back if a process was killed in ``put_in_place`` before the new one had its name."""
    if not os.path.lexists(final):
        for old in _leftovers(final, "old"):
            old.rename(final)
            return


def sweep(final: Path) -> None:
    """Remove what killed processes left behind while they saved ``final`` or removed any checkpoint beside it."""
    restore(final)
    for path in [*_leftovers(final, "saving"), *_leftovers(final, "old"), *_siblings(final, _REMOVED)]:
        remove(path)


def _leftovers(final: Path, role: str) -> list[Path]:
    return _siblings(final, re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{8}}\.{role}"))


def _siblings(final: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not final.parent.is_dir():
        return []
    named = [path for path in final.parent.iterdir() if pattern.fullmatch(path.name)]
    return sorted(path for path in named if is_ours(path, "checkpoint"))


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    with suppress(OSError):  # Some file systems cannot synchronize a folder.
        _fsync(folder)


def sync_tree(folder: Path) -> None:
    """Return when everything in a folder is on the disk, whichever process of this machine wrote it."""
    for parent, _, files in os.walk(folder):
        for file in files:
            _fsync(Path(parent, file))
        sync_folder(Path(parent))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
