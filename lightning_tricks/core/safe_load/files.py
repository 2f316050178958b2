"""Checkpoint files that are read without executing what is in them, and why one was not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_tricks.core.safe_load.damage import UNSAFE


def load_zero_file(file: Path) -> Any:
    """Read a file that DeepSpeed wrote, with memory-mapped tensors.

    Raises:
        ValueError: If the file is damaged, or holds more than plain values and records of DeepSpeed.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    own = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]  # records, which execute nothing
    try:
        with torch.serialization.safe_globals(own):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file can raise almost any exception
        raise ValueError(unread(file)) from error


def unread(file: Path) -> str:
    """Why torch refused to read a file, as an error message."""
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # this fails, too, for some damaged files
        refused = []
    if not refused:
        return f"{file} is damaged or not a checkpoint."
    return f"{file} was not read: it holds {', '.join(sorted(refused))}, and {UNSAFE}."
