"""Whether numbers are finite, asked without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_tricks.core.weights import local_part


def all_finite(tensors: Sequence[Tensor]) -> bool | Tensor:
    """Whether no tensor has an infinite or undefined entry: one reading of each.

    Args:
        tensors: Floating-point or complex tensors, dense or sparse; of DTensors this rank's part is looked at.

    Returns:
        A bool, or a boolean scalar on the device of the first tensor if one is on another device than the CPU.

    Example:
        >>> all_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])
        False
    """
    parts = list(map(_plain, tensors))
    known = all(_finite(part) for part in parts if part.is_cpu)  # nothing to wait for
    there = [part for part in parts if not part.is_cpu and part.numel()]
    if not there:
        return known
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in there) else torch.float32
    largest = torch._foreach_norm(there, float("inf"))  # one kernel, but on CPU it is ten times slower
    # undefined entries make all of these undefined
    finite = torch.stack([each.to(there[0].device, dtype) for each in largest]).isfinite().all()
    return (finite & known).to(parts[0].device)


def names_of_nonfinite(named: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors with an infinite or undefined entry."""
    return [name for name, tensor in named.items() if not all_finite([tensor])]


def _finite(part: Tensor) -> bool:
    # a sum is the fastest reading on CPU; it is finite of finite terms only, but may overflow, and extremes cannot
    total = part.sum() if part.ndim else part
    return math.isfinite(total.item()) or all(math.isfinite(each.item()) for each in torch.aminmax(part))


def _plain(tensor: Tensor) -> Tensor:
    tensor = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
