"""Checkpoint folders of shards, as Lightning's ModelParallelStrategy writes them, read under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.core.safe_load.reader import SafeReader, load_safely


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
