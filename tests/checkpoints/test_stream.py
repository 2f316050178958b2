"""What is streamed is what the formats' own readers read, and one tensor is in memory at a time."""

from __future__ import annotations

import gc
import io
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from lightning_tricks.checkpoints.stream import SAFETENSORS_TYPES, LazyTensor, memory_mapped, write_safetensors


def stored(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor.dtype, tensor.clone)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


STATE = {
    **{str(dtype): torch.randn(3, 5).mul(9).to(dtype) for dtype in SAFETENSORS_TYPES},
    "nothing": torch.empty(4, 0),
    "number": torch.tensor(2.5),
    "turned": torch.arange(6.0).view(2, 3).T,
    "one byte": torch.tensor([True]),
    "é\n": torch.tensor([1]),
}


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, stored])
def test_safetensors_reads_what_was_streamed(wrap: Any, tmp_path: Path) -> None:
    opened = io.BytesIO()
    write_safetensors(opened, {name: wrap(tensor) for name, tensor in STATE.items()})
    loaded = load(opened.getvalue())
    assert loaded.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(loaded[name]) == bits(tensor)
    (tmp_path / "a.safetensors").write_bytes(opened.getvalue())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_empty_state_is_a_file_too() -> None:
    opened = io.BytesIO()
    write_safetensors(opened, {})
    assert load(opened.getvalue()) == {}


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot hold torch.complex128: write a \.pt file"):
        write_safetensors(io.BytesIO(), {"a": torch.ones(1).cdouble()})


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2).half()])
def test_a_tensor_that_is_not_as_announced_is_refused(other: Tensor) -> None:
    with pytest.raises(ValueError, match=r"a tensor of torch.float32 \[2\] is torch.float"):
        write_safetensors(io.BytesIO(), {"a": LazyTensor(torch.Size([2]), torch.float32, lambda: other)})


def test_one_tensor_at_a_time_is_alive() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def read() -> Tensor:
        gc.collect()
        assert not any(each() is not None for each in alive)
        tensor = torch.ones(10)
        alive.append(weakref.ref(tensor))
        return tensor

    state = {name: LazyTensor(torch.Size([10]), torch.float32, read) for name in "abc"}
    write_safetensors(io.BytesIO(), state)
    assert len(alive) == 3


def test_mapped_tensors_are_tied_as_the_stored_ones_and_no_file_is_seen(tmp_path: Path) -> None:
    state: dict[str, Any] = {name: stored(tensor) for name, tensor in STATE.items()}
    state |= {"tied": state["turned"], "extra": {"a": 1}, "tensor": torch.ones(1)}
    with memory_mapped(state, tmp_path) as tensors:
        assert not os.listdir(tmp_path)
        assert list(tensors) == [*STATE, "tied"]
        for name, tensor in STATE.items():
            assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(tensors[name]) == bits(tensor)
            assert tensors[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensors["tied"].data_ptr() == tensors["turned"].data_ptr()
    with memory_mapped({"a": 1}, tmp_path) as tensors:
        assert tensors == {}
