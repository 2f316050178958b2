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


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block it is renamed to ``path``, or removed after an error.

    A link at ``path`` is replaced, and its target stays.

    Raises:
        OSError: If the file could not be written; other errors of the block are raised unchanged.
    """
    temporary = path.with_name(
        f".{secrets.token_hex(8)}{path.suffix}"
    )  # in the same folder, for rename(); writers tell the format by the suffix
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
