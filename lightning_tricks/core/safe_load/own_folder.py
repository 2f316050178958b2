"""Folders that this package has made: only these are cleared, replaced and removed.

A name is no proof: a user may have a folder ``fold0``, too. A folder of ours therefore has a marker, a file that says
what the folder is for, from before anything else is in it until nothing else is. Links are never followed.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal

MARKER = ".lightning_tricks"
REMEDY = "Move it away, or choose another folder."
Purpose = Literal["checkpoint", "fit", "demo"]


def marker_of(purpose: Purpose) -> bytes:
    """The content of the marker, which both packages share: the name is that of the distribution."""
    return f"A {purpose} of lightning-tricks has made this folder, and may replace and remove what is in it.\n".encode()


def is_ours(folder: Path, purpose: Purpose) -> bool:
    """Whether this is a folder, and no link to one, with the marker."""
    marker = folder / MARKER
    if folder.is_symlink() or marker.is_symlink() or not marker.is_file():
        return False
    expected = marker_of(purpose)
    with marker.open("rb") as file:
        return file.read(len(expected) + 1) == expected


def mark(folder: Path, purpose: Purpose) -> Path:
    """Make a folder ours, by a marker; return it.

    Raises:
        FileExistsError: If another file has the marker's name.
    """
    marker = folder / MARKER
    if is_ours(folder, purpose):
        return folder
    if marker.is_file() and not marker.is_symlink() and marker_of(purpose).startswith(marker.read_bytes()):
        marker.unlink()  # an unfinished one, of a process that was killed
    with marker.open("xb") as file:
        file.write(marker_of(purpose))
    return folder


def require_own(folder: Path, purpose: Purpose) -> None:
    """Raise unless a name is free, or that of a folder which is empty or ours.

    Raises:
        FileExistsError: If something else has the name.
    """
    require_folder(folder)
    if not folder.exists() or is_ours(folder, purpose):
        return
    if others := sorted(name for name in os.listdir(folder) if name != MARKER):
        raise FileExistsError(
            f"{folder} is in the way: a folder with {others[0]!r} that lightning_tricks has not made. {REMEDY}"
        )


def require_folder(path: Path) -> None:
    """Raise unless a name is free, or that of a folder and no link to one.

    Raises:
        FileExistsError: If something else has the name.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise FileExistsError(f"{path} is in the way: {'a link' if path.is_symlink() else 'no folder'}. {REMEDY}")


def new_folder(folder: Path, purpose: Purpose) -> None:
    """Make a folder of ours with nothing else in it; what one of ours held is removed.

    Raises:
        FileExistsError: If something else has the name.
        FileNotFoundError: If the folder that it is to be in was removed.
    """
    require_own(folder, purpose)
    if is_ours(folder, purpose):
        remove(folder)
    try:
        folder.mkdir(exist_ok=True)
        mark(folder, purpose)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no folder {folder.parent}: it was removed while it was in use.") from error


def remove(folder: Path) -> None:
    """Remove a folder of ours, the marker last: what is left by a killed process, or by a busy disk, still is ours."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MARKER:
            with suppress(OSError):
                path.unlink()
    if {*os.listdir(folder)} <= {MARKER}:
        (folder / MARKER).unlink(missing_ok=True)
        folder.rmdir()


def unused(folder: Path, stem: str, suffix: str) -> Path:
    """A path in a folder that nothing has: ``stem`` with the suffix, or ``stem-v1`` and so on."""
    names = (f"{stem}{f'-v{number}' if number else ''}{suffix}" for number in count())
    return next(folder / name for name in names if not os.path.lexists(folder / name))


def remove_file(path: Path) -> bool:
    """Remove a file or a link; whether there was one."""
    with suppress(FileNotFoundError):
        path.unlink()
        return True
    return False
