"""Plan files: what the results in a folder depend on, so that other results are never put beside them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import IO, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.safe_load.own_folder import REMEDY, is_ours


def this_rank() -> int:
    """The rank of this process, also before a Trainer has started the others."""
    # Lightning sets the rank when it is imported, and again in a Trainer.
    rank = getattr(rank_zero_only, "rank", 0)
    return rank or int(os.environ.get("RANK", 0))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a folder, until this one leaves the block or ends in any way.

    Raises:
        ValueError: If another process trains in it.
        FileExistsError: If its ``.lock`` is not one of ours.
        FileNotFoundError: If the folder was removed meanwhile.
    """
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    if this_rank():
        yield
        return
    with _open_lock(folder / ".lock") as file:
        owner = file.read()
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers of loaders, which outlive it, would keep a flock
        except BlockingIOError as error:
            raise ValueError(
                f"process {owner} trains in {folder}: wait until it has ended, or choose another folder."
            ) from error
        except OSError as error:
            rank_zero_warn(f"{folder} is on a disk without locks ({error}): let one process at a time train in it.")
        file.seek(0)
        file.write(_owner())
        file.truncate()
        file.flush()
        try:
            yield
        except Exception as error:
            _require_kept(folder, file, error)
            raise
        _require_kept(folder, file)


def require_lock(folder: Path) -> None:
    """Raise if the ``.lock`` in a folder is not one of ours, before anything is written there.

    Raises:
        FileExistsError: If the ``.lock`` is another's.
    """
    if os.path.lexists(folder / ".lock"):
        _open_lock(folder / ".lock").close()


def _owner() -> str:
    return f"{os.getpid()} on {platform.node()}"


def _open_lock(path: Path) -> IO[str]:
    """Open a lock file of ours, or make one; nothing is written to a file of others.

    Raises:
        FileExistsError: If something else has the name.
    """
    with suppress(FileExistsError), path.open("x") as new:  # which follows no link
        new.write(_owner())
    try:
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # which Windows lacks
        file = os.fdopen(os.open(path, flags), "r+", errors="replace")
    except OSError as error:  # a link, a folder
        raise FileExistsError(f"{path} is in the way: {error.strerror}. {REMEDY}") from error
    # An empty one is a lock that another rank is making, or was killed over.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or not re.fullmatch(r"(\d+ on .*)?", file.read(300)):
        file.close()
        raise FileExistsError(f"{path} is in the way: it is no lock that lightning_tricks has made. {REMEDY}")
    file.seek(0)
    return file


def _require_kept(folder: Path, lock: IO[str], error: Exception | None = None) -> None:
    """Raise if the lock was removed, as with its folder, in which others may have made files again."""
    if os.fstat(lock.fileno()).st_nlink == 0:
        raise FileNotFoundError(
            f"{folder}, or the .lock in it, was removed while it was in use: start again."
        ) from error


def finite(value: Any) -> Any:
    """The same data without NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_json(file: Path, what: Any) -> None:
    """Write plain data to a file, atomically."""
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(what, indent=1) + "\n")


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write a result in plain data with its checksum, atomically."""
    write_json(file, {**record, "checksum": _checksum(record)})


def read_record(file: Path) -> dict[str, Any]:
    """The result that ``write_record`` has written.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        record = dict(json.loads(file.read_text()))
    except (ValueError, TypeError, RecursionError):
        record = {}
    if record.pop("checksum", None) != _checksum(record):
        raise ValueError(f"{file} is damaged: remove it, and what it tells of is done again.")
    return record


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def require_plan(file: Path, plan: Mapping[str, Any], results: str) -> None:
    """Raise unless a plan file has this plan; rank 0 writes it if there is none, and no results are there either.

    Args:
        file: The JSON file. It marks its folder as one in which the names of results are ours.
        plan: All that the results in its folder depend on, by the names for error messages.
        results: A pattern of the names that results have.

    Raises:
        ValueError: If the file has another plan; the message names what differs. If there is none, and others have the
            names of results.
        FileExistsError: If the plan file is a link or a folder.
    """
    if not os.path.lexists(file):
        if this_rank() == 0:
            _require_no_results(file.parent, results)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, plan)
        return
    if file.is_symlink() or not file.is_file():
        raise FileExistsError(f"{file} is in the way: it is no file. {REMEDY}")
    try:
        kept = dict(json.loads(file.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: choose another folder.") from error
    if differ := [*_differences(kept, json.loads(json.dumps(plan)))]:
        raise ValueError(
            f"{file.parent} has results of other settings: {'; '.join(differ)}. Choose another folder, or pass the same"
            " again."
        )


def _require_no_results(folder: Path, results: str) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    for name in names:
        if re.fullmatch(results, name) and not is_ours(folder / name, "fit"):
            raise ValueError(f"{folder} has files of something else: choose another folder, or move {name} away.")


def _differences(kept: Mapping[str, Any], now: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for key in {**kept, **now}:
        before, after = kept.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{inside}{key}: ")
        elif before != after:
            yield f"{inside}{key} was {before!r}, now {after!r}"
