"""Checkpoints in one file under FSDP2: full tensors, gathered from the shards and copied into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.core.weights.fsdp2 import local_part


def full_state(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Gather a state's full tensors one by one into host memory; all ranks take part.

    Args:
        state: A state_dict of a module or an optimizer.
        keep: Whether this rank keeps the result; the others return an empty dictionary.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().to("cpu", copy=True) if keep else None

    result = apply_to_collection(dict(state), Tensor, gather)
    return result if keep else {}


@torch.no_grad()
def load_module(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """``module.load_state_dict(state)`` for a state of full tensors: each rank copies its shard."""
    shards = module.state_dict()
    sharded = dict(state)
    for name, full in state.items():
        if _is_shard_of(shard := shards.get(name), full):
            shard.to_local().copy_(local_part(full, shard))
            sharded[name] = shard
    module.load_state_dict(sharded, strict=strict)


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)`` for a state of full tensors: each rank copies its shard.

    States with the shape of their parameter are sharded; others, such as a step counter, are loaded unchanged.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameter_of = dict(zip(numbers, parameters, strict=False))  # load_state_dict reports a mismatch.
    sharded = {
        number: apply_to_collection(states, Tensor, _shard, parameter_of.get(number))
        for number, states in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": sharded})


def _shard(full: Tensor, parameter: Tensor | None) -> Tensor:
    if not _is_shard_of(parameter, full):
        return full
    shard = cast(DTensor, torch.empty_like(parameter, dtype=full.dtype))
    shard.to_local().copy_(local_part(full, shard))
    return shard


def _is_shard_of(shard: Any, full: Any) -> TypeGuard[DTensor]:
    return isinstance(shard, DTensor) and shard.shape == full.shape
