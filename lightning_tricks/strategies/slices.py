"""Reading checkpoints that are folders of slices, as Lightning's ModelParallelStrategy writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.core.plain import PlainReader, load_plain


def read_module(folder: Path, module: nn.Module, *, strict: bool) -> None:
    """Load the weights; all ranks take part."""
    state = {"state_dict": get_model_state_dict(module)}
    load_plain(state, PlainReader(folder), strict=strict)
    set_model_state_dict(module, state["state_dict"], options=StateDictOptions(strict=strict))


@torch.no_grad()
def read_optimizer(folder: Path, module: nn.Module, optimizer: Optimizer, *, number: int) -> None:
    """Load the states of an optimizer, which is the checkpoint's ``number``-th; all ranks take part.

    torch's own reader makes states for all parameters first, by a step, and expects them all to be in the checkpoint.
    Parameters that never had a gradient have none.

    Raises:
        ValueError: If the checkpoint has no such optimizer, or one of other parameters.
    """
    reader = PlainReader(folder)
    metadata = reader.metadata
    own = {name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()}  # as torch saves compiled ones
    paths = {key: path for key, path in metadata.planner_data.items() if path[0] == f"optimizer_{number}"}
    flat = {key: _empty(metadata.state_dict_metadata[key], own.get(path[2])) for key, path in paths.items()}
    load_plain(flat, reader)
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
