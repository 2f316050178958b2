"""Tensors written one after the other, so that a model larger than the memory can become a file."""

from __future__ import annotations

import contextlib
import json
import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_tricks.core.report import progress

ALIGNMENT = 64  # bytes, for tensors that are mapped from a file

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that is still in a file: known by shape and dtype, read when it is asked for.

    Two names of one weight have the same object.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its size once it is read."""
        return self.shape.numel() * self.dtype.itemsize


def write_safetensors(opened: BinaryIO, state: Mapping[str, Tensor | StoredTensor]) -> None:
    """Write ``length of the header | header as JSON | bytes of each tensor``, with one tensor in memory at a time.

    Tied weights, which the format does not have, are written under each name.

    Raises:
        ValueError: If the format has no such dtype.

    References:
        https://huggingface.co/docs/safetensors/index#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for that
    names = sorted(state, key=lambda name: (-state[name].dtype.itemsize, name))  # so that each one is aligned
    end = 0
    for name in names:
        tensor = state[name]
        if tensor.dtype not in SAFETENSORS_TYPES:
            raise ValueError(f"a .safetensors file cannot hold {tensor.dtype}: write a .pt file instead.")
        start, end = end, end + tensor.shape.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    opened.write(len(text).to_bytes(8, "little") + text)
    for name in progress(names, "writing"):
        _write(opened, state[name])


@contextlib.contextmanager
def mapped(state: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Tensor]]:
    """The stored tensors of a state_dict as ordinary ones, by name, mapped from a file that nobody sees.

    Args:
        state: The state_dict; its other values are left out.
        folder: Where the file is, as large as the tensors. It goes with the process, even a killed one.
    """
    places: dict[StoredTensor, int] = {}
    with tempfile.TemporaryFile(dir=folder) as opened:
        for value in progress(state.values(), "reading", len(state)):
            if isinstance(value, StoredTensor) and value not in places:
                opened.write(bytes(-opened.tell() % ALIGNMENT))
                places[value] = opened.tell()
                _write(opened, value)
        opened.flush()
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) if opened.tell() else b""
        tensors = {stored: _view(memory, place, stored) for stored, place in places.items()}
        yield {name: tensors[value] for name, value in state.items() if isinstance(value, StoredTensor)}


def _view(memory: Any, place: int, stored: StoredTensor) -> Tensor:
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    flat = torch.frombuffer(memory, dtype=stored.dtype, count=stored.shape.numel(), offset=place)
    return flat.view(stored.shape)


def _write(opened: BinaryIO, tensor: Tensor | StoredTensor) -> None:
    whole = tensor.read() if isinstance(tensor, StoredTensor) else tensor.detach().cpu()
    if whole.shape != tensor.shape or whole.dtype != tensor.dtype:
        raise ValueError(f"a tensor of {tensor.dtype} {list(tensor.shape)} is {whole.dtype} {list(whole.shape)}.")
    opened.write(whole.contiguous().reshape(-1).view(torch.uint8).numpy().data)
