"""A file that is written whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to inside the block; at its end the file is renamed to ``path``, or is gone after an error.

    Raises:
        OSError: If it could not be written.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")  # in the same folder; a suffix is a format
    try:
        yield temporary
        temporary.replace(path)
    except FileExistsError:  # said so by who writes
        raise
    except (OSError, RuntimeError) as error:  # the latter is what torch makes of a full disk
        raise OSError(f"{path} was not written: {str(error).splitlines()[0]}") from error
    finally:
        temporary.unlink(missing_ok=True)
