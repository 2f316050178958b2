"""A file that is written whole or not at all."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What torch says, by RuntimeErrors, of a full disk: its writer of zip files, C++ streams, its writer before torch 1.6.
_FULL = re.compile(r"inline_container|PytorchStreamWriter|iostream|write\(\): ")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A name to write to inside the block; at its end the file is renamed to ``path``, or is gone after an error.

    A link with that name is replaced; what it points to stays.

    Raises:
        OSError: If it could not be written; another error of the block is raised as it is.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")  # in the same folder; a suffix is a format
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)  # who may read it stays as it was
        temporary.replace(path)
    except FileExistsError:  # said so by who writes
        raise
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _FULL.search(str(error)):
            raise
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise OSError(f"{path} was not written: {first}") from error
    finally:
        temporary.unlink(missing_ok=True)
