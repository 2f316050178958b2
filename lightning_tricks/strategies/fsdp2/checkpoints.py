"""Reading checkpoints that are folders of slices, as Lightning's ModelParallelStrategy writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.optim import Optimizer

from lightning_tricks.core.safe_load.reader import SafeReader, load_safely


def read_module(folder: Path, module: nn.Module, *, strict: bool) -> None:
    """Load the weights; all ranks take part."""
    state = {"state_dict": get_model_state_dict(module)}
    load_safely(state, SafeReader(folder), strict=strict)
    set_model_state_dict(module, state["state_dict"], options=StateDictOptions(strict=strict))


@torch.no_grad()
def read_optimizer(folder: Path, module: nn.Module, optimizer: Optimizer, *, number: int) -> None:
    """Load the states of an optimizer, which is the checkpoint's ``number``-th; all ranks take part.

    torch's own reader makes states for all parameters first, by a step, and expects them all to be in the checkpoint.
    Parameters that never had a gradient have none.

    Raises:
        ValueError: If the checkpoint has no such optimizer, or one of other parameters.
    """
    reader = SafeReader(folder)
    metadata = reader.metadata
    own = {name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()}  # as torch saves compiled ones
    paths = {key: path for key, path in metadata.planner_data.items() if path[0] == f"optimizer_{number}"}
    flat = {key: _empty(metadata.state_dict_metadata[key], own.get(path[2])) for key, path in paths.items()}
    load_safely(flat, reader)
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for key, (_, kind, owner, name) in paths.items():
        (state if kind == "state" else groups).setdefault(owner, {})[name] = flat[key]
    _load(optimizer, state, [groups[n] for n in sorted(groups)], {p: name for name, p in own.items()})


def _load(
    optimizer: Optimizer, state: dict[str, Any], groups: list[dict[str, Any]], names: dict[nn.Parameter, str]
) -> None:
    ours = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if [sorted(mine) for mine in ours] != [sorted(group["params"]) for group in groups]:
        raise ValueError("The checkpoint's optimizer has other parameters, or other groups of them, than this one.")
    saved = [{**group, "params": mine} for group, mine in zip(groups, ours, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": saved})


def _empty(entry: Any, like: Tensor | None) -> Tensor | None:
    """Room for what is stored: a slice beside the parameter's, or all of it; what is no tensor needs none."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(like, DTensor) and like.shape == entry.size:
        return torch.empty_like(like, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


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
