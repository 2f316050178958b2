"""The weights in a folder by DeepSpeed ZeRO: fp32 master weights in flat partitions, one per rank.

DeepSpeed's own conversion leaves out the frozen weights of ZeRO-1 and extra state. It also reads all weights of ZeRO-1
and 2, and all frozen weights of ZeRO-3, into memory at once.
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

from lightning_tricks.checkpoints.stream import LazyTensor
from lightning_tricks.core.install import required
from lightning_tricks.core.safe_load.damage import damage, zero_tag
from lightning_tricks.core.safe_load.files import load_zero_file
from lightning_tricks.core.safe_load.hyperparameters import refuse_instantiator

MODEL, OPTIMIZER = "_mp_rank_00_model_states.pt", "_mp_rank_00_optim_states.pt"
PREFIX = "_forward_module."  # Lightning's name of the module in DeepSpeed's engine.


def zero_weights(folder: Path) -> dict[str, Any]:
    """The state_dict under ZeRO-1, 2 or 3 with the fp32 master weights as lazy tensors.

    Floating-point buffers are fp32, as in DeepSpeed's conversion, whatever dtype DeepSpeed saved them in.

    Raises:
        ImportError: If deepspeed is missing; the files hold objects of it.
        ValueError: If files are missing or contradict each other.
    """
    # DeepSpeed's logger then writes to standard error.
    with required("a DeepSpeed checkpoint needs the package deepspeed", "deepspeed"), redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
    tag = zero_tag(folder)
    if experts := sorted(file.name for file in tag.glob("layer_*_expert_*")):
        raise ValueError(f"it has DeepSpeed's experts in files of their own ({experts[0]}), which are not joined here")
    optimizers = [_load(file)["optimizer_state_dict"] for file in by_rank(tag, OPTIMIZER)]
    require_all_ranks(optimizers)
    sharded = is_zero3(optimizers)
    models = [_load(file) for file in model_files(tag, optimizers)]
    model = models[0]
    masters = dict(_masters_of_zero3(model, optimizers) if sharded else _masters_of_zero1(model, optimizers))
    if sharded:
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            masters[name] = _join_lazily([rank["frozen_param_fragments"][name] for rank in models], shape)
    masters.update({name: masters[tied] for name, tied in model["shared_params"].items() if tied in masters})
    state = {**_model_state(model, masters, weights_are_empty=sharded), **masters}
    return {name.removeprefix(PREFIX): value for name, value in state.items()}


def _model_state(model: dict[str, Any], masters: Collection[str], *, weights_are_empty: bool) -> dict[str, Any]:
    """The state_dict of a rank, its tensors as lazy ones.

    Args:
        model: The model states of a rank.
        masters: The names of the weights with a master.
        weights_are_empty: Whether weights are placeholders, as in ZeRO-3, so that each needs a master.
    """
    state: dict[str, Any] = {}
    buffers, missing = set(model["buffer_names"]), []
    for name, value in model["module"].items():
        if isinstance(value, Tensor):
            dtype = torch.float32 if name in buffers and value.is_floating_point() else value.dtype
            state[name] = LazyTensor(value.shape, dtype, partial(value.to, dtype))
            if weights_are_empty and name not in buffers and name not in masters:
                missing.append(name)
        else:
            state[name] = value
    if missing:
        raise ValueError(f"it has no values of {', '.join(sorted(missing)[:3])}")
    return state


def client_state(folder: Path) -> dict[str, Any]:
    """What Lightning has saved besides the weights: the states of callbacks, loops and schedulers."""
    file = sorted(zero_tag(folder).glob(f"*{MODEL.removeprefix('_')}"))[0]
    state = dict(_load(file))
    refuse_instantiator(state, file)
    return state


def _load(file: Path) -> Any:
    if reason := damage(file):
        raise ValueError(f"{file.name}: {reason}")
    return load_zero_file(file)


def by_rank(tag: Path, ending: str) -> list[Path]:
    """The files whose names end in a rank and ``ending``, in the order of the ranks."""
    files = {int(file.name.removesuffix(ending).split("_")[-1]): file for file in tag.glob(f"*zero_pp_rank_*{ending}")}
    return [files[rank] for rank in sorted(files)]


def is_zero3(optimizers: Sequence[dict[str, Any]]) -> bool:
    """Whether the optimizer states are those of ZeRO-3, and not of ZeRO-1 or 2."""
    return "fp32_flat_groups" in optimizers[0]


def model_files(tag: Path, optimizers: Sequence[dict[str, Any]]) -> list[Path]:
    """The files of model states: of each rank under ZeRO-3, else one.

    Raises:
        ValueError: If there are not as many as ranks.
    """
    if not is_zero3(optimizers):
        return [tag / MODEL.removeprefix("_")]
    files = by_rank(tag, MODEL)
    if len(files) != len(optimizers):
        raise ValueError(f"it has model states of {len(files)} ranks, expected {len(optimizers)}")
    return files


def require_all_ranks(optimizers: Sequence[dict[str, Any]]) -> None:
    """Raise unless there are as many optimizer states as ranks have saved."""
    count = optimizers[0]["partition_count"] if optimizers else 0  # A list with one count per group in ZeRO-1 and 2.
    counts = set(count if isinstance(count, list) else [count])
    if counts != {len(optimizers)}:
        expected = " or ".join(map(str, sorted(counts)))
        raise ValueError(f"it has optimizer states of {len(optimizers)} ranks, expected {expected}")


def _masters_of_zero3(model: dict[str, Any], optimizers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, LazyTensor]]:
    """The master weights of ZeRO-3.

    Each weight is padded and divided into one partition per rank. The partitions of a rank are concatenated in its
    flat tensors, in the order of the weights.
    """
    ranks = [optimizer["fp32_flat_groups"] for optimizer in optimizers]
    start = 0
    for group in model["param_shapes"]:
        for name, shape in group.items():
            stop = start + math.ceil(shape.numel() / len(ranks))
            yield name, _join_lazily([part for flats in ranks for part in _slice(flats, start, stop)], shape)
            start = stop
    if any(sum(flat.numel() for flat in flats) != start for flats in ranks):
        raise ValueError("it has other weights than its optimizer states")


def _masters_of_zero1(model: dict[str, Any], optimizers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, LazyTensor]]:
    """The master weights of ZeRO-1 and 2.

    The weights of a group are concatenated and padded, and the result is divided into one partition per rank.
    """
    paddings = optimizers[0].get("param_alignment_paddings")
    for number, group in enumerate(model["param_shapes"]):
        flats = [optimizer["single_partition_of_fp32_groups"][number] for optimizer in optimizers]
        start = 0
        for index, (name, shape) in enumerate(group.items()):
            stop = start + shape.numel()
            yield name, _join_lazily(_slice(flats, start, stop), shape)
            start = stop + (paddings[number][index] if paddings is not None else 0)
        align = 2 * len(flats)  # DeepSpeed pads a group to a multiple of this, and saves only a part of the padding.
        if math.ceil(start / align) != math.ceil(sum(flat.numel() for flat in flats) / align):
            raise ValueError("it has other weights than its optimizer states")


def _slice(flats: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Views of the elements ``[start, stop)`` of the concatenated flat tensors."""
    parts, offset = [], 0
    for flat in flats:
        low, high = max(start - offset, 0), min(stop - offset, flat.numel())
        if low < high:
            parts.append(flat[low:high])
        offset += flat.numel()
    return parts


def _join_lazily(parts: list[Tensor], shape: Any) -> LazyTensor:
    """A lazy tensor of that shape from the first elements of the concatenated parts."""
    size = torch.Size(shape)
    if sum(part.numel() for part in parts) < size.numel():
        raise ValueError("it has other weights than its optimizer states")
    dtype = parts[0].dtype if parts else torch.float32
    return LazyTensor(size, dtype, partial(_join, parts, size, dtype))


@torch.no_grad()  # DeepSpeed saves master weights that require gradients.
def _join(parts: list[Tensor], size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.cat([*parts, torch.empty(0, dtype=dtype)])[: size.numel()].view(size)
