"""DeepSpeed's operators, which torch compiles at their first use, and locks of compilations that were killed.

torch creates a file named ``lock`` in the operator's folder, keeps it open while it compiles, and removes it. All other
processes that need the operator wait until the file is gone: forever, if the compilation was killed.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from lightning_tricks.core.safe_load.own_folder import remove_file

QUIET = 900  # Seconds without a write after which no machine compiles any more; an operator takes one to five minutes.
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "glusterfs", "fuse", "9p", "afs")


def prepare_to_compile(op: str) -> None:
    """Say that an operator is about to be compiled, and remove the locks of compilations that were killed.

    Args:
        op: DeepSpeed's name of the operator, such as "cpu_adam".
    """
    from deepspeed.git_version_info import installed_ops

    remove_stale_locks()
    if not (installed_ops.get(op) or any((folder / op / f"{op}.so").exists() for folder in _folders())):
        rank_zero_info(f"Compiling DeepSpeed's {op}: it takes about a minute, once.")


def remove_stale_locks() -> None:
    """Remove the locks that no compilation holds, with a warning for each.

    What other machines and users do is not visible here. A lock on a network disk or of another user is therefore
    removed after 15 minutes in which nothing was written beside it.
    """
    for lock in stale_locks():
        with _one_process_at_a_time(lock.parent):
            if (_is_on_network(lock) or _is_of_another(lock)) and lock.exists() and _quiet_seconds(lock) < QUIET:
                left = (QUIET - _quiet_seconds(lock)) / 60
                warnings.warn(
                    f"{lock}: another machine or user compiles an operator of DeepSpeed, or was killed. Waiting for it,"
                    f" at most {left:.0f} minutes; delete the file if nobody compiles.",
                    stacklevel=2,
                )
                while lock.exists() and _quiet_seconds(lock) < QUIET:
                    time.sleep(1)
            if lock.exists() and not _is_held(lock) and remove_file(lock):
                warnings.warn(
                    f"{lock} was left by a compilation that was killed, and every process would wait for it: removed.",
                    stacklevel=2,
                )


def stale_locks() -> list[Path]:
    """The locks that no process of this machine holds: empty files, as torch makes them."""
    named = [lock for folder in _folders() for lock in sorted(folder.glob("*/lock"))]
    locks = [lock for lock in named if lock.is_file() and not lock.is_symlink() and not lock.stat().st_size]
    return [lock for lock in locks if not _is_held(lock)]


def _folders() -> list[Path]:
    """The folders in which torch compiles extensions, a subfolder each; one for every version of Python and CUDA."""
    from torch.utils import cpp_extension  # Imported late because it loads setuptools.

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return [root, *(folder for folder in root.glob("*") if folder.is_dir())]


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the file open."""
    import psutil  # DeepSpeed requires it.

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                return True
    return False


def _is_on_network(path: Path) -> bool:
    import psutil

    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[folder] for folder in path.resolve().parents if folder in mounts), "")
    return kind.lower().startswith(NETWORK)


def _is_of_another(lock: Path) -> bool:
    """Whether another user has made the lock, whose open files only the superuser sees."""
    with suppress(AttributeError, FileNotFoundError):  # Windows has no numbers of users.
        return os.getuid() not in (0, lock.stat().st_uid)
    return False


def _quiet_seconds(lock: Path) -> float:
    """The seconds since something was written in the folder of a lock."""
    written = [0.0]
    for file in lock.parent.iterdir():
        with suppress(FileNotFoundError):
            written.append(file.stat().st_mtime)
    return time.time() - max(written)


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Let the ranks of this machine look at a folder one after the other, so that none removes another's new lock."""
    try:
        import fcntl
    except ImportError:  # Windows has none, and refuses to remove a file that is open.
        yield
        return
    check = os.open(folder / "lock.check", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        fcntl.flock(check, fcntl.LOCK_EX)
        yield
    finally:
        os.close(check)
