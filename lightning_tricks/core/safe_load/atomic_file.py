"""Atomic writes: a file has its new content, or is untouched."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Messages of torch's RuntimeErrors for a full disk: from its zip writer, C++ streams, and its writer before torch 1.6.
_FULL = re.compile(r"inline_container|PytorchStreamWriter|iostream|write\(\): ")


def require_file(path: Path) -> None:
    """Raise if a path has something that is no file, which no file may replace.

    Raises:
        FileExistsError: For a folder, a pipe, a device or a socket, or a link to one.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} exists and is no file: choose another name.")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block it is renamed to ``path``, or removed after an error.

    A link at ``path`` is replaced, and its target stays.

    Raises:
        FileExistsError: If the path has something that is no file.
        OSError: If the file could not be written; other errors of the block are raised unchanged.
    """
    require_file(path)
    # In the same folder, for rename(), and with the suffix, by which writers know the format.
    temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)  # keeps the permissions
        temporary.replace(path)
    except FileExistsError:  # raised by the block
        raise
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _FULL.search(str(error)):
            raise
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise OSError(f"{path} was not written: {first}") from error
    finally:
        temporary.unlink(missing_ok=True)
