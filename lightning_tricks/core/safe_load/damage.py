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

PROGRAM = "it is a program (TorchScript) and no checkpoint"


def damage(path: str | os.PathLike[str] | IO[bytes]) -> str | None:
    """What is wrong with a zip file, torch's format; None for an intact one, and for a file of another format.

    torch writes checksums, but does not compare them: a flipped bit loads as another number. Files that were saved with
    ``torch.serialization.set_crc32_options(False)`` have no checksums.
    """
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                return "its records are compressed, and torch maps them into memory as they are"
            end = max((record.header_offset + record.file_size for record in records), default=0)
            if sum(record.file_size for record in records) > end:
                return "its records overlap"  # a small file could take hours to read
            wrong = archive.testzip() if any(record.CRC for record in records) else None
    except Exception as error:  # a damaged directory of the zip file can raise almost any exception
        return f"its records cannot be read ({type(error).__name__})"
    return wrong and f"the checksum of {wrong} is wrong"


def is_program(path: str | os.PathLike[str] | IO[bytes]) -> bool:
    """Whether a file is an archive of TorchScript, which ``torch.load`` runs unless ``weights_only=True``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())  # by which torch tells it
    except Exception:  # no zip file, or a damaged one
        return False


def refuse_program(file: str | os.PathLike[str]) -> None:
    """Raise if a file is a program, which ``torch.load`` would run if it was told ``weights_only=False``.

    Raises:
        ValueError: For a program.
    """
    if is_program(file):
        raise ValueError(f"{file} was not read: {PROGRAM}.")


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
        try:
            tag = zero_tag(path)
        except ValueError as error:
            return str(error)
        found = any(tag.glob("*_model_states.pt")) and any(tag.glob("*_optim_states.pt"))
        return None if found else f"it has no model and optimizer states in {tag.name!r}, which its file latest names"
    if any(path.glob("*/*zero_pp_rank_*.pt")):
        return "it has no latest, which DeepSpeed writes last: saving was interrupted"
    missing = [name for name in (".metadata", "meta.pt") if not (path / name).is_file()]
    if len(missing) == 2 and not any(path.glob("*.distcp")):
        return "it has neither .metadata (FSDP) nor latest (ZeRO)"
    return f"it has no {missing[0]}: saving was interrupted" if missing else None


def zero_tag(folder: Path) -> Path:
    """The folder inside a checkpoint of DeepSpeed that its file ``latest`` names.

    Raises:
        ValueError: If ``latest`` names a folder outside of the checkpoint.
    """
    name = (folder / "latest").read_text(errors="replace").strip()
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"its file latest names {name[:60]!r}, which is no folder inside it")
    return folder / name


def folder_error() -> type[BaseException]:
    """The exception of torch for checkpoint folders, which derives from BaseException."""
    # Importing it takes a tenth of a second.
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException
