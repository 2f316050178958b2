"""Checkpoint files: read without running what is in them, written whole or not at all."""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.checkpoints.stream import StoredTensor, mapped, write_safetensors
from lightning_tricks.core.checks import check_bool, check_type, some
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.safe_load.damage import damage
from lightning_tricks.core.safe_load.reader import unread

PathLike = str | os.PathLike[str]

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def path_of(name: str, value: PathLike) -> Path:
    """The argument as a path.

    Raises:
        TypeError: If it is none.
    """
    check_type(name, value, str, os.PathLike)
    return Path(value)


def load(path: PathLike) -> dict[str, Any]:
    """The dictionary in a checkpoint file, its tensors memory-mapped, their checksums compared.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: For a sharded checkpoint, which is a folder.
        ImportError: For a .safetensors file, if safetensors is missing.
        ValueError: If the file is damaged, is no checkpoint, or holds objects that could run code.
    """
    file = Path(path)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: make its weights one file first, with lightning-tricks export.")
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}.")
    loaded = _load_safetensors(file) if file.suffix == ".safetensors" else _load_torch(file)
    if not (isinstance(loaded, dict) and all(isinstance(key, str) for key in loaded)):
        raise ValueError(f"{file} is not a checkpoint: it holds no dictionary with names.")
    return loaded


def _load_torch(file: Path) -> Any:
    with file.open("rb") as opened:
        zipped = opened.read(4) == b"PK\x03\x04"  # the files of torch before 1.6 are not, and cannot be mapped
    try:
        wrong = damage(file)
        if wrong is None:
            return torch.load(file, map_location="cpu", mmap=zipped, weights_only=True)
    except Exception as error:  # a damaged file raises almost anything
        raise ValueError(unread(file)) from error
    raise ValueError(f"{file} is damaged: {wrong}.")


def _load_safetensors(file: Path) -> dict[str, Tensor]:
    safetensors = _safetensors()
    try:
        return safetensors.load_file(file)
    except Exception as error:
        raise ValueError(f"{file} is damaged or not a safetensors file.") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("a .safetensors file needs the package safetensors: pip install safetensors") from error
    return safetensors.torch


def is_lightning(checkpoint: dict[str, Any]) -> bool:
    """Whether it is what Lightning saves, not a plain state_dict."""
    return isinstance(checkpoint.get("state_dict"), dict)


def weights_in(checkpoint: dict[str, Any], path: PathLike) -> dict[str, Any]:
    """The state_dict in a Lightning checkpoint, or the checkpoint itself if it is a plain one.

    Raises:
        ValueError: If it is neither.
    """
    if is_lightning(checkpoint):
        return checkpoint["state_dict"]
    if all(
        isinstance(value, Tensor | StoredTensor) or key.endswith("_extra_state") for key, value in checkpoint.items()
    ):
        return checkpoint
    raise ValueError(f"{path} is neither a Lightning checkpoint nor a plain state_dict: it has {some(checkpoint)}.")


def identity(tensor: Tensor) -> Hashable:
    """Equal for names of one tensor (tied weights), as long as all of them are alive."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def check_output(output: PathLike, *, force: bool) -> Path:
    """The file to be written.

    Raises:
        ValueError: For a suffix that stands for no format.
        FileNotFoundError: If its folder does not exist.
        FileExistsError: If it exists, unless ``force``.
        ImportError: For a .safetensors file, if safetensors is missing.
    """
    file = path_of("output", output)
    check_bool("force", force)
    if file.suffix not in SUFFIXES:
        raise ValueError(f"the name of the output must end in {', '.join(SUFFIXES)}, got {file.name!r}.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {file.parent}: make it first.")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: choose another name.")
    if file.exists() and not force:
        raise FileExistsError(f"{file} exists: choose another name, or overwrite it with force=True (--force).")
    if file.suffix == ".safetensors":
        _safetensors()
    return file


def save(checkpoint: dict[str, Any], output: PathLike, *, force: bool) -> None:
    """Write a Lightning checkpoint or a plain state_dict; of the former a .safetensors file gets the weights only.

    The name stands for a whole file at any instant: the old one, then the new one. Stored tensors of a plain state_dict
    are read and written one after the other; a torch file then needs its space on the disk twice while it is written.

    Raises:
        OSError: If it could not be written, and as ``check_output``.
        ValueError: If safetensors cannot hold it, and as ``check_output``.
    """
    file = check_output(output, force=force)
    with atomic_write(file) as temporary:
        with temporary.open("xb") as opened:
            if file.suffix == ".safetensors":
                write_safetensors(opened, _only_tensors(weights_in(checkpoint, output)))
            else:
                with mapped(checkpoint, file.parent) as tensors:
                    complete = copy.copy(checkpoint)
                    complete.update(tensors)
                    torch.save(_with_own_storage(complete), opened)
            opened.flush()
            os.fsync(opened.fileno())
        check_output(file, force=force)  # another process may have been quicker


def _only_tensors(state: dict[str, Any]) -> dict[str, Any]:
    if other := [name for name, value in state.items() if not isinstance(value, Tensor | StoredTensor)]:
        raise ValueError(
            f"a .safetensors file holds tensors only, and {some(other)} is none: write a .pt file instead."
        )
    return state


def _with_own_storage(checkpoint: dict[str, Any]) -> dict[str, Any]:
    if is_lightning(checkpoint):
        return {**checkpoint, "state_dict": _compact(checkpoint["state_dict"])}
    return _compact(checkpoint)


def _compact(state: dict[str, Any]) -> dict[str, Any]:
    """The same values without memory around them: torch would save all of a storage of which a tensor is a part."""
    result = copy.copy(state)  # keeps the versions of the modules, which are in an attribute of a state_dict
    own: dict[Hashable, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
            result[name] = own.setdefault(identity(value), value.detach() if whole else value.detach().clone())
    return result
