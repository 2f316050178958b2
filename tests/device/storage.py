"""Where a tensor is: its memory is the host's in any case, and notes on its storage say that it is on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ON_DEVICE = "on the simulated device"
UNKNOWN = "made by C++ code, on the device of a tensor that is not known"
PINNED = "in pinned memory"
ARRIVES = "the number of the copy that fills it"
LEAVES = "the number of the copy that reads it"


def notes(x: Tensor) -> dict[str, Any]:
    """The notes on a tensor's storage, which its views share; of a tensor without a storage they are lost."""
    with torch._C.DisableTorchFunctionSubclass():
        if x.layout == torch.sparse_coo:
            x = torch._C.TensorBase._values(x)
        try:
            return x.untyped_storage().__dict__
        except (NotImplementedError, RuntimeError):
            return {}


def on_device(x: Tensor) -> bool:
    """Whether a tensor, or a tensor inside of it, is on the device."""
    if is_traceable_wrapper_subclass(x):
        with torch._C.DisableTorchFunctionSubclass():
            parts = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
            return any(on_device(part) for part in parts if isinstance(part, Tensor))
    return ON_DEVICE in notes(x)


def put(x: Tensor, device: bool | None) -> None:
    """Note that a tensor is on the device or in host memory, or with None that nobody knows."""
    if x.is_meta:
        return
    parts = [x]
    if x.layout == torch.sparse_coo:
        parts = [torch._C.TensorBase._values(x), torch._C.TensorBase._indices(x)]
    for part in parts:
        known = notes(part)
        known.pop(UNKNOWN, None)
        known.pop(ON_DEVICE, None)
        if device is not False:
            known[UNKNOWN if device is None else ON_DEVICE] = True


def key(x: Tensor) -> int | None:
    """What is equal for tensors that share their memory; None for a tensor without a storage."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
