"""What the host learns from the device, with as few waits for it as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors in host memory, of one dtype; those of a device come in one transfer."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def reached(device: torch.device) -> Callable[[], None]:
    """Mark what the device has to do so far; the result, when it is called, returns once that is done.

    The host waits only if the device has not come to the mark by then, whatever it was given after it.
    """
    if device.type in ("cpu", "xla"):  # whose copies to host memory are complete when they return
        return lambda: None
    mark = torch.Event(device)
    mark.record()
    return lambda: None if mark.query() else mark.synchronize()
