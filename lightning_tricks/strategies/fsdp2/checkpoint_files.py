"""Checkpoints under FSDP2, in a file or a folder; apart from the strategy, since they need no Trainer.

A file has full tensors, gathered from the shards and copied into them. A folder of shards is read and written as by
Lightning's ModelParallelStrategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.safe_load.reader import SafeReader, load_safely
from lightning_tricks.core.weights.fsdp2 import local_part
from lightning_tricks.core.weights.tensors import full_tensor


def full_state(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Gather a state's full tensors one by one into host memory; all ranks take part.

    Args:
        state: A state_dict of a module or an optimizer.
        keep: Whether this rank keeps the result; the others return an empty dictionary.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        full = full_tensor(tensor)
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
    parameter_of = dict(zip(numbers, weights_of(optimizer), strict=False))  # load_state_dict reports a mismatch.
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


def write_folder(checkpoint: dict[str, Any], folder: Path, group: dist.ProcessGroup | None, *, with_rest: bool) -> None:
    """Write a checkpoint as Lightning's ModelParallelStrategy does; all ranks take part.

    Args:
        checkpoint: What the Trainer saves.
        folder: An existing folder.
        group: The process group in which the ranks talk; None for the default one.
        with_rest: Whether this rank writes everything but weights and optimizer states.
    """
    states = {f"optimizer_{index}": state for index, state in enumerate(checkpoint.get("optimizer_states", ()))}
    dcp.save({"state_dict": checkpoint["state_dict"], **states}, checkpoint_id=folder, process_group=group)
    if with_rest:
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        torch.save(rest, folder / "meta.pt")


def read_module(folder: Path, module: nn.Module, *, strict: bool) -> None:
    """Load the weights; all ranks take part."""
    state = {"state_dict": get_model_state_dict(module)}
    load_safely(state, SafeReader(folder), strict=strict)
    set_model_state_dict(module, state["state_dict"], options=StateDictOptions(strict=strict))


@torch.no_grad()
def read_optimizer(folder: Path, module: nn.Module, optimizer: Optimizer, *, index: int) -> None:
    """Load the states of an optimizer; all ranks take part.

    torch's own reader first steps the optimizer to make states for all parameters, and expects the checkpoint to have
    all of them. But a parameter that never had a gradient has no state.

    Args:
        folder: The checkpoint folder.
        module: The sharded module.
        optimizer: An optimizer of the module's parameters.
        index: The optimizer's position in the checkpoint, from 0.

    Raises:
        ValueError: If the checkpoint's optimizer has other parameters or groups.
    """
    reader = SafeReader(folder)
    metadata = reader.metadata
    # torch saves the parameters of compiled modules without this prefix.
    parameters = {name.replace("_orig_mod.", ""): parameter for name, parameter in module.named_parameters()}
    paths = {key: path for key, path in metadata.planner_data.items() if path[0] == f"optimizer_{index}"}
    entries = {
        key: _empty_like_entry(metadata.state_dict_metadata[key], parameters.get(path[2]))
        for key, path in paths.items()
    }
    load_safely(entries, reader)
    states: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for key, (_, kind, owner, name) in paths.items():
        (states if kind == "state" else groups).setdefault(owner, {})[name] = entries[key]
    saved_groups = [groups[number] for number in sorted(groups)]
    names = {parameter: name for name, parameter in parameters.items()}
    expected = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if [sorted(group) for group in expected] != [sorted(group["params"]) for group in saved_groups]:
        raise ValueError("The checkpoint's optimizer has other parameters, or other groups of them, than this one.")
    reordered = [{**group, "params": order} for group, order in zip(saved_groups, expected, strict=True)]
    optimizer.load_state_dict({"state": states, "param_groups": reordered})


def _empty_like_entry(entry: Any, parameter: Tensor | None) -> Tensor | None:
    """An empty tensor to read a checkpoint entry into, sharded like the parameter if it has its shape."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(parameter, DTensor) and parameter.shape == entry.size:
        return torch.empty_like(parameter, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)
