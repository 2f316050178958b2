"""Damaged and incomplete checkpoints, found before they are loaded."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import IO, Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

UNSAFE = (
    "loading more than tensors and plain values can run code. If you trust it, allow that with"
    " torch.serialization.add_safe_globals"
)


def damage(path: str | os.PathLike[str] | IO[bytes]) -> str | None:
    """What is wrong with a zip file, torch's format; None for an intact one, and for a file of another format.

    torch writes checksums, but does not compare them: a flipped bit loads as another number. Files that were saved with
    ``torch.serialization.set_crc32_options(False)`` have no checksums.
    """
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip() if any(record.CRC for record in archive.infolist()) else None
    except Exception as error:  # a damaged directory of the zip file can raise almost any exception
        return f"its records cannot be read ({type(error).__name__})"
    return wrong and f"the checksum of {wrong} is wrong"


def require_undamaged_file(path: Any) -> None:
    """Raise if the file of a Trainer's ``ckpt_path`` is damaged; folders and None are left to others."""
    if path and os.path.isfile(path) and (wrong := damage(path)):
        raise MisconfigurationException(
            f"{path} is damaged: {wrong}. What torch loads from it is not what was saved: use an earlier checkpoint."
        )


def unfinished(folder: str | os.PathLike[str]) -> str | None:
    """Why a folder is not a complete checkpoint, by the files that FSDP2 and DeepSpeed write last; None if it is.

    Args:
        folder: A folder that Lightning's ModelParallelStrategy, FSDPStrategy or DeepSpeedStrategy saved.
    """
    path = Path(folder)
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(errors="replace").strip()
        found = any((path / tag).glob("*_model_states.pt")) and any((path / tag).glob("*_optim_states.pt"))
        return None if found else f"it has no model and optimizer states in {tag!r}, which its file latest names"
    if any(path.glob("*/*zero_pp_rank_*.pt")):
        return "it has no latest, which DeepSpeed writes last: saving was interrupted"
    missing = [name for name in (".metadata", "meta.pt") if not (path / name).is_file()]
    if len(missing) == 2 and not any(path.glob("*.distcp")):
        return "it has neither .metadata (FSDP) nor latest (ZeRO)"
    return f"it has no {missing[0]}: saving was interrupted" if missing else None


def folder_error() -> type[BaseException]:
    """The exception of torch for checkpoint folders, which derives from BaseException."""
    # Importing it takes a tenth of a second.
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException
