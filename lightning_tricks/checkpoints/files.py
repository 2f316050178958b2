"""Checkpoint files: read without executing anything in them, written atomically."""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.checkpoints.stream import LazyTensor, memory_mapped, write_safetensors
from lightning_tricks.core.checks import check_bool, check_type, some
from lightning_tricks.core.safe_load.atomic_file import atomic_write, require_file
from lightning_tricks.core.safe_load.damage import damage, refuse_program
from lightning_tricks.core.safe_load.files import unread
from lightning_tricks.core.safe_load.hyperparameters import refuse_instantiator
from lightning_tricks.core.weights.tensors import identity

PathLike = str | os.PathLike[str]

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def path_of(name: str, value: PathLike) -> Path:
    """The value of argument ``name`` as a path.

    Raises:
        TypeError: If the value is not a path.
        ValueError: For a null character, which no path can have.
    """
    check_type(name, value, str, os.PathLike)
    path = os.fsdecode(value)
    if "\0" in path:
        raise ValueError(f"{name} must be a path, got {value!r}.")
    return Path(path)


def folder_of(name: str, value: PathLike) -> Path:
    """The value of argument ``name`` as the path of a folder, which need not exist.

    Raises:
        NotADirectoryError: If the path, or what the folder is to be in, is a file.
        TypeError, ValueError: As ``path_of``.
    """
    path = path_of(name, value)
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise NotADirectoryError(
            f"{name} must be a folder, got {str(path)!r}, and {there} is none: choose another name."
        )
    return path


def load(path: PathLike) -> dict[str, Any]:
    """Load the dictionary in a checkpoint file with memory-mapped tensors, after comparing their checksums.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: For a sharded checkpoint, which is a folder.
        ImportError: If safetensors is missing for a .safetensors file.
        ValueError: If the file is damaged, is not a checkpoint, or holds objects that could run code.
    """
    file = Path(path)
    if file.is_dir():
        raise IsADirectoryError(
            f"{file} is a folder: write its weights to one file first, with lightning-tricks export."
        )
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}.")
    loaded = _load_safetensors(file) if file.suffix == ".safetensors" else load_values(file)
    if not (isinstance(loaded, dict) and all(isinstance(key, str) for key in loaded)):
        raise ValueError(f"{file} is not a checkpoint: it holds no dictionary with string keys.")
    refuse_instantiator(loaded, file)
    return loaded


def load_values(file: Path) -> Any:
    """What ``torch.save`` wrote, after comparing checksums: memory-mapped tensors and plain values.

    Raises:
        ValueError: If the file is damaged, is a program, or holds objects that could run code.
    """
    with file.open("rb") as opened:
        zipped = opened.read(4) == b"PK\x03\x04"  # Files of torch before 1.6 are not zipped and cannot be mapped.
    refuse_program(file)
    try:
        reason = damage(file)
        if reason is None:
            return torch.load(file, map_location="cpu", mmap=zipped, weights_only=True)
    except Exception as error:  # A damaged file can raise almost any exception.
        raise ValueError(unread(file)) from error
    raise ValueError(f"{file} is damaged: {reason}.")


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
    """Whether Lightning saved the checkpoint, rather than it being a plain state_dict."""
    return isinstance(checkpoint.get("state_dict"), dict)


def weights_in(checkpoint: dict[str, Any], path: PathLike) -> dict[str, Any]:
    """The state_dict in a Lightning checkpoint, or the checkpoint itself if it is a plain state_dict.

    Raises:
        ValueError: If the checkpoint is neither.
    """
    if is_lightning(checkpoint):
        return checkpoint["state_dict"]
    if all(isinstance(value, Tensor | LazyTensor) or key.endswith("_extra_state") for key, value in checkpoint.items()):
        return checkpoint
    raise ValueError(f"{path} is neither a Lightning checkpoint nor a plain state_dict: it has {some(checkpoint)}.")


def check_output(output: PathLike, *, force: bool) -> Path:
    """Check that a file can be written, and return its path.

    Raises:
        ValueError: If no format has the suffix.
        FileNotFoundError: If its folder does not exist.
        FileExistsError: If the file exists, unless ``force``; for a pipe or a device.
        IsADirectoryError: For a folder.
        ImportError: If safetensors is missing for a .safetensors file.
    """
    file = path_of("output", output)
    check_bool("force", force)
    if file.suffix not in SUFFIXES:
        raise ValueError(f"the name of the output must end in {', '.join(SUFFIXES)}, got {file.name!r}.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {file.parent}: create it first.")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: choose another name.")
    if os.path.lexists(file) and not force:
        raise FileExistsError(f"{file} exists: choose another name, or overwrite it with force=True.")
    require_file(file)
    if file.suffix == ".safetensors":
        _safetensors()
    return file


def save(checkpoint: dict[str, Any], output: PathLike, *, force: bool) -> None:
    """Write a Lightning checkpoint or a plain state_dict atomically.

    A .safetensors file gets only the weights of a Lightning checkpoint. Lazy tensors of a plain state_dict are read and
    written one by one; a torch file then needs twice its size on the disk while it is written.

    Raises:
        OSError: If the file could not be written; also as ``check_output``.
        ValueError: If a .safetensors file cannot hold a value; also as ``check_output``.
    """
    file = check_output(output, force=force)
    with atomic_write(file) as temporary:
        with temporary.open("xb") as opened:
            if file.suffix == ".safetensors":
                write_safetensors(opened, _only_tensors(weights_in(checkpoint, output)))
            else:
                with memory_mapped(checkpoint, file.parent) as tensors:
                    loaded = copy.copy(checkpoint)
                    loaded.update(tensors)
                    torch.save(_with_own_storage(loaded), opened)
            opened.flush()
            os.fsync(opened.fileno())
        check_output(file, force=force)  # Another process may have written it meanwhile.


def _only_tensors(state: dict[str, Any]) -> dict[str, Any]:
    if other := [name for name, value in state.items() if not isinstance(value, Tensor | LazyTensor)]:
        raise ValueError(
            f"a .safetensors file holds tensors only, got another value for {some(other)}: write a .pt file instead."
        )
    return state


def _with_own_storage(checkpoint: dict[str, Any]) -> dict[str, Any]:
    if is_lightning(checkpoint):
        return {**checkpoint, "state_dict": _compact(checkpoint["state_dict"])}
    return _compact(checkpoint)


def _compact(state: dict[str, Any]) -> dict[str, Any]:
    """Clone the tensors that are a part of a larger storage: torch.save would write all of that storage."""
    result = copy.copy(state)  # A copy keeps state_dict's attribute with the versions of the modules.
    compact: dict[Hashable, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            fills_storage = value.untyped_storage().nbytes() == value.numel() * value.element_size()
            tensor = value.detach() if fills_storage else value.detach().clone()
            result[name] = compact.setdefault(identity(value), tensor)
    return result
