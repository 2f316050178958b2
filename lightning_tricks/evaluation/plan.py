"""Plan files: what the results in a folder depend on, so that other results are never put beside them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lightning_tricks.core.safe_load.atomic_file import atomic_write


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
    """
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    if this_rank():
        yield
        return
    # Mode "w" would empty the file that another process has locked.
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers of loaders, which outlive it, would keep a flock
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"process {file.read()} trains in {folder}: wait until it has ended, or choose another folder."
            ) from error
        except OSError as error:
            rank_zero_warn(f"{folder} is on a disk without locks ({error}): let one process at a time train in it.")
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()
        yield


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
    except (ValueError, TypeError):
        record = {}
    if record.pop("checksum", None) != _checksum(record):
        raise ValueError(f"{file} is damaged: remove it, and what it tells of is done again.")
    return record


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def require_plan(file: Path, plan: Mapping[str, Any]) -> None:
    """Raise unless a plan file has this plan; rank 0 writes it if there is none.

    Args:
        file: The JSON file.
        plan: All that the results in its folder depend on, by the names for error messages.

    Raises:
        ValueError: If the file has another plan; the message names what differs.
    """
    if not file.exists():
        if this_rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, plan)
        return
    try:
        kept = dict(json.loads(file.read_text()))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: choose another folder.") from error
    if differ := [*_differences(kept, json.loads(json.dumps(plan)))]:
        raise ValueError(
            f"{file.parent} has results of other settings: {'; '.join(differ)}. Choose another folder, or pass the same"
            " again."
        )


def _differences(kept: Mapping[str, Any], now: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for key in {**kept, **now}:
        before, after = kept.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{inside}{key}: ")
        elif before != after:
            yield f"{inside}{key} was {before!r}, now {after!r}"
