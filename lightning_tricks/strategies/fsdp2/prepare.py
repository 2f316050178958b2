"""Preparing a module to be sharded: real weights on the device, equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def require_untied(module: nn.Module) -> None:
    """Raise for tied weights on the meta device: materializing them would untie them."""
    meta = [p for owner in module.modules() for p in owner.parameters(recurse=False) if p.is_meta]
    if tied := [parameter for parameter, uses in Counter(meta).items() if uses > 1]:
        raise MisconfigurationException(
            f"A weight on the meta device is shared by several modules, of shape {tuple(tied[0].shape)}. Create such a"
            " model on a real device, or tie its weights after they are materialized."
        )


def prepare(module: nn.Module, device: torch.device) -> None:
    """Materialize a module's unsharded tensors, move them to the device and copy rank 0's values to all ranks.

    Raises:
        MisconfigurationException: For weights on the meta device of a module without ``reset_parameters``.
    """
    owners = list(_unsharded_modules(module))
    for owner in owners:
        if any(tensor.is_meta for tensor in _direct_tensors(owner)):
            owner.to_empty(device=device, recurse=False)
            initialize = getattr(owner, "reset_parameters", None)
            if not callable(initialize):
                raise MisconfigurationException(
                    f"{type(owner).__name__} has weights on the meta device and no reset_parameters() to initialize"
                    " them. Define it, or create the model on a real device."
                )
            initialize()
    for tensor in dict.fromkeys(tensor for owner in owners for tensor in _direct_tensors(owner)):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
            broadcast([tensor])


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's tensors into those of all ranks, one broadcast per dtype; all ranks take part."""
    if dist.get_world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = torch.cat([tensor.detach().flatten() for tensor in group])
        dist.broadcast(flat.view(torch.uint8), src=0)  # as bytes: NCCL has no integers of 16 bits
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _direct_tensors(module: nn.Module) -> list[Tensor]:
    """The module's own parameters and buffers, without those of its submodules."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _unsharded_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its submodules, except those that are sharded already."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _unsharded_modules(child)
