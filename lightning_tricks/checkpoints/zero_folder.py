"""The weights in a folder by DeepSpeed ZeRO: fp32 masters cut into flat parts, one a rank.

DeepSpeed's own conversion reads the weights of ZeRO-1 and 2, and frozen ones of ZeRO-3, into memory as a whole, leaves
out the frozen ones of ZeRO-1, and extra state.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.checkpoints.stream import StoredTensor
from lightning_tricks.core.safe_load.damage import damage
from lightning_tricks.core.safe_load.reader import load_zero_file

MODEL, OPTIMIZER = "_mp_rank_00_model_states.pt", "_mp_rank_00_optim_states.pt"
PREFIX = "_forward_module."  # of DeepSpeed's engine in Lightning


def zero_weights(folder: Path) -> dict[str, Any]:
    """The state_dict under ZeRO-1, 2 or 3, with the fp32 masters; its tensors are not read yet.

    As in DeepSpeed's conversion floating-point buffers are fp32, whatever DeepSpeed has made of them.

    Raises:
        ImportError: If deepspeed is missing, of which the files hold objects.
        ValueError: If files are missing or do not fit together.
    """
    try:
        with redirect_stdout(sys.stderr):  # where its logger writes from then on
            import deepspeed  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "a DeepSpeed checkpoint needs the package deepspeed: pip install 'lightning-tricks[deepspeed]'"
        ) from error
    tag = folder / (folder / "latest").read_text().strip()
    optimizers = [_load(file)["optimizer_state_dict"] for file in _by_rank(tag, OPTIMIZER)]
    _require_all_ranks(optimizers)
    sharded = "fp32_flat_groups" in optimizers[0]  # ZeRO-3, else ZeRO-1 or 2
    models = [_load(file) for file in (_by_rank(tag, MODEL) if sharded else [tag / MODEL.removeprefix("_")])]
    if sharded and len(models) != len(optimizers):
        raise ValueError(f"it has model states of {len(models)} ranks, of {len(optimizers)} that saved")
    model = models[0]
    found = dict(_sharded(model, optimizers) if sharded else _replicated(model, optimizers))
    if sharded:
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            found[name] = _joined([each["frozen_param_fragments"][name] for each in models], shape)
    found.update({name: found[same] for name, same in model["shared_params"].items() if same in found})
    state = {**_whole(model, found, placeholders=sharded), **found}
    return {name.removeprefix(PREFIX): value for name, value in state.items()}


def _whole(model: dict[str, Any], found: Collection[str], *, placeholders: bool) -> dict[str, Any]:
    """What each rank has whole, in the order of the state_dict: buffers, extra state, in ZeRO-1 and 2 the weights."""
    state, buffers = model["module"], set(model["buffer_names"])
    tensors = {name for name, value in state.items() if isinstance(value, Tensor)}
    if placeholders and (missing := tensors - buffers - set(found)):
        raise ValueError(f"it has no values of {', '.join(sorted(missing)[:3])}")
    return {
        name: _stored(value, torch.float32 if name in buffers and value.is_floating_point() else value.dtype)
        if name in tensors
        else value
        for name, value in state.items()
    }


def _load(file: Path) -> Any:
    if wrong := damage(file):
        raise ValueError(f"{file.name}: {wrong}")
    return load_zero_file(file)


def _by_rank(tag: Path, ending: str) -> list[Path]:
    """The files of the ranks, in their order; each name has the rank before the ending."""
    files = {int(file.name.removesuffix(ending).split("_")[-1]): file for file in tag.glob(f"*zero_pp_rank_*{ending}")}
    return [files[rank] for rank in sorted(files)]


def _require_all_ranks(optimizers: Sequence[dict[str, Any]]) -> None:
    count = optimizers[0]["partition_count"] if optimizers else 0  # one for each group in ZeRO-1 and 2
    counts = set(count if isinstance(count, list) else [count])
    if counts != {len(optimizers)}:
        raise ValueError(f"it has optimizer states of {len(optimizers)} ranks, of {sorted(counts)} that saved")


def _sharded(model: dict[str, Any], optimizers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, StoredTensor]]:
    """Of ZeRO-3: each weight is cut into one part a rank, padded; a rank's parts follow each other in its groups."""
    ranks, start = [each["fp32_flat_groups"] for each in optimizers], 0
    for group in model["param_shapes"]:
        for name, shape in group.items():
            stop = start + math.ceil(shape.numel() / len(ranks))
            yield name, _joined([part for flats in ranks for part in _cut(flats, start, stop)], shape)
            start = stop
    if any(sum(flat.numel() for flat in flats) != start for flats in ranks):
        raise ValueError("it has other weights than its optimizer states")


def _replicated(model: dict[str, Any], optimizers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, StoredTensor]]:
    """Of ZeRO-1 and 2: the weights of a group follow each other, and the whole is cut into one part a rank."""
    paddings = optimizers[0].get("param_alignment_paddings")
    for number, group in enumerate(model["param_shapes"]):
        flats, start = [each["single_partition_of_fp32_groups"][number] for each in optimizers], 0
        for place, (name, shape) in enumerate(group.items()):
            stop = start + shape.numel()
            yield name, _joined(_cut(flats, start, stop), shape)
            start = stop + (paddings[number][place] if paddings is not None else 0)
        align = 2 * len(flats)  # DeepSpeed pads a group to a multiple of that, and leaves some of it out when it saves
        if math.ceil(start / align) != math.ceil(sum(flat.numel() for flat in flats) / align):
            raise ValueError("it has other weights than its optimizer states")


def _cut(flats: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """The elements ``[start, stop)`` of flat tensors one after the other, as views."""
    parts, first = [], 0
    for flat in flats:
        low, high = max(start - first, 0), min(stop - first, flat.numel())
        if low < high:
            parts.append(flat[low:high])
        first += flat.numel()
    return parts


def _joined(parts: list[Tensor], shape: Any) -> StoredTensor:
    """The first elements of the parts one after the other, in that shape."""
    size = torch.Size(shape)
    if sum(part.numel() for part in parts) < size.numel():
        raise ValueError("it has other weights than its optimizer states")
    dtype = parts[0].dtype if parts else torch.float32
    return StoredTensor(size, dtype, partial(_join, parts, size, dtype))


@torch.no_grad()  # DeepSpeed saves masters that require gradients
def _join(parts: list[Tensor], size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.cat([*parts, torch.empty(0, dtype=dtype)])[: size.numel()].view(size)


def _stored(tensor: Tensor, dtype: torch.dtype) -> StoredTensor:
    return StoredTensor(tensor.shape, dtype, partial(tensor.to, dtype))
