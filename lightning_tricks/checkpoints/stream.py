"""Writing tensors one by one, so that a model larger than the memory fits into a file."""

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

ALIGNMENT = 64  # Bytes, for tensors that are memory-mapped from a file.

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
class LazyTensor:
    """A tensor of known shape and dtype that is read from a file by ``read()``.

    All names of a tied weight share one object.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in memory."""
        return self.shape.numel() * self.dtype.itemsize


def write_safetensors(opened: BinaryIO, state: Mapping[str, Tensor | LazyTensor]) -> None:
    """Write ``length of the header | header as JSON | bytes of each tensor``, with one tensor in memory at a time.

    The format has no tied weights: they are written under each name.

    Raises:
        ValueError: If the format has no such dtype.

    References:
        https://huggingface.co/docs/safetensors/index#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Required by transformers.
    names = sorted(state, key=lambda name: (-state[name].dtype.itemsize, name))  # Keeps tensors aligned.
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
def memory_mapped(state: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Tensor]]:
    """Read the lazy tensors of a state_dict into a temporary file and map them from it into memory.

    Args:
        state: The state_dict; its other values are left out.
        folder: The folder of the temporary file. The file has no name, takes the size of the tensors, and disappears
            with the process, even a killed one.

    Yields:
        The tensors by name.
    """
    offsets: dict[LazyTensor, int] = {}
    with tempfile.TemporaryFile(dir=folder) as opened:
        for value in progress(state.values(), "reading", len(state)):
            if isinstance(value, LazyTensor) and value not in offsets:
                opened.write(bytes(-opened.tell() % ALIGNMENT))
                offsets[value] = opened.tell()
                _write(opened, value)
        opened.flush()
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) if opened.tell() else b""
        tensors = {lazy: _view(memory, offset, lazy) for lazy, offset in offsets.items()}
        yield {name: tensors[value] for name, value in state.items() if isinstance(value, LazyTensor)}


def _view(memory: Any, offset: int, lazy: LazyTensor) -> Tensor:
    if not lazy.nbytes:
        return torch.empty(lazy.shape, dtype=lazy.dtype)
    flat = torch.frombuffer(memory, dtype=lazy.dtype, count=lazy.shape.numel(), offset=offset)
    return flat.view(lazy.shape)


def _write(opened: BinaryIO, tensor: Tensor | LazyTensor) -> None:
    data = tensor.read() if isinstance(tensor, LazyTensor) else tensor.detach().cpu()
    if data.shape != tensor.shape or data.dtype != tensor.dtype:
        raise ValueError(f"a tensor of {tensor.dtype} {list(tensor.shape)} is {data.dtype} {list(data.shape)}.")
    opened.write(data.contiguous().reshape(-1).view(torch.uint8).numpy().data)
