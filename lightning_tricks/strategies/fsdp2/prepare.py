"""What a submodule needs before it is cut into slices: real weights on the device, the same on all ranks."""

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
    """Raise for weights on the meta device that several modules share, which would no longer when they are made."""
    named = [p for each in module.modules() for p in each.parameters(recurse=False) if p.is_meta]
    if shared := [p for p, uses in Counter(named).items() if uses > 1]:
        raise MisconfigurationException(
            f"A weight on the meta device is shared by several modules, of shape {tuple(shared[0].shape)}: make such a"
            " model on a real device, or tie its weights after it was made real."
        )


def prepare(module: nn.Module, device: torch.device) -> None:
    """Make what is to be sharded with a module real, on the device and equal to that of rank 0.

    Raises:
        MisconfigurationException: For weights on the meta device of a module without ``reset_parameters``.
    """
    for owner in _unsharded(module):
        own = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            owner.to_empty(device=device, recurse=False)
            if not callable(initialize := getattr(owner, "reset_parameters", None)):
                raise MisconfigurationException(
                    f"{type(owner).__name__} has weights on the meta device and no reset_parameters() that gives them"
                    " values: define it, or make the model on a real device."
                )
            initialize()
    whole = [t for owner in _unsharded(module) for t in (*owner.parameters(False), *owner.buffers(False))]
    for tensor in dict.fromkeys(whole):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
            broadcast([tensor])


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Write the tensors of rank 0 into those of all ranks, together by their dtypes; all ranks take part."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values() if dist.get_world_size() > 1 else ():
        flat = torch.cat([tensor.detach().flatten() for tensor in group])
        dist.broadcast(flat, src=0)
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its submodules, without what is sharded already."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _unsharded(child)
