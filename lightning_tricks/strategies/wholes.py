"""Checkpoints of whole tensors, as a plain Trainer writes and reads them, for a model and an optimizer in shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.optim import Optimizer


def gathered(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """The state with whole tensors in host memory, gathered one by one; all ranks take part, one has to ``keep`` it."""

    def whole(tensor: Tensor) -> Tensor | None:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().to("cpu", copy=True) if keep else None

    result = apply_to_collection(dict(state), Tensor, whole)
    return result if keep else {}


@torch.no_grad()
def load_module(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """``module.load_state_dict(state)`` of whole tensors, of which each rank takes its slice."""
    own = module.state_dict()
    filled = dict(state)
    for name, whole in state.items():
        if _same(like := own.get(name), whole):
            _fill(like, whole)
            filled[name] = like
    module.load_state_dict(filled, strict=strict)


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)`` of whole tensors, of which each rank takes its slice.

    Tensors that belong to a parameter have its shape; the others, such as a counter of steps, are taken as they are.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    like = dict(zip(numbers, parameters, strict=False))  # load_state_dict itself says what does not fit
    sliced = {n: apply_to_collection(kept, Tensor, _slice, like.get(n)) for n, kept in state["state"].items()}
    optimizer.load_state_dict({**state, "state": sliced})


def _slice(whole: Tensor, like: Tensor | None) -> Tensor:
    if not _same(like, whole):
        return whole
    mine = cast(DTensor, torch.empty_like(like, dtype=whole.dtype))
    _fill(mine, whole)
    return mine


def _same(like: Any, whole: Any) -> TypeGuard[DTensor]:
    return isinstance(like, DTensor) and like.shape == whole.shape


def _fill(mine: DTensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor, which may be in a file, into its slice."""
    coordinate = mine.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the mesh has no module"
    for dimension, placement in enumerate(mine.placements):
        if isinstance(placement, Shard):
            parts = whole.chunk(mine.device_mesh.size(dimension), placement.dim)
            number = coordinate[dimension]
            whole = parts[number] if number < len(parts) else whole.narrow(placement.dim, 0, 0)
    mine.to_local().copy_(whole)
