"""A file that is written whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to inside the block; at its end the file is renamed to ``path``, or is gone after an error.

    A link with that name is replaced; what it points to stays.

    Raises:
        OSError: If it could not be written.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")  # in the same folder; a suffix is a format
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)  # who may read it stays as it was
        temporary.replace(path)
    except FileExistsError:  # said so by who writes
        raise
    except (OSError, RuntimeError) as error:  # the latter is what torch makes of a full disk
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise OSError(f"{path} was not written: {first}") from error
    finally:
        temporary.unlink(missing_ok=True)
