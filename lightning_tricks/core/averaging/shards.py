"""Averages in a checkpoint folder: the shards of every rank, written and read by torch's distributed checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_tricks.core.safe_load.reader import SafeReader, load_safely
from lightning_tricks.core.weights.local import LocalWeights

STAMP = "stamp"


def write(folder: Path, weights: LocalWeights, kinds: Mapping[str, Mapping[str, Tensor]], *, stamp: int) -> None:
    """Write local parts by kind and name; all ranks take part, and the metadata is written last."""
    tensors = {
        f"{kind}/{key}": t for kind, parts in kinds.items() for key, t in weights.checkpoint_tensors(parts).items()
    }
    dcp.save({**tensors, STAMP: torch.tensor(stamp, device="cpu")}, checkpoint_id=folder)


def kinds_in(folder: Path) -> dict[str, set[str]]:
    """The names of the weights in a folder of shards, by kind; a key of DeepSpeed's ends in the rank of the part."""
    kinds: dict[str, set[str]] = {}
    for key in SafeReader(folder).metadata.state_dict_metadata:
        kind, _, name = key.partition("/")
        if name:
            kinds.setdefault(kind, set()).add(re.sub(r"@\d+$", "", name))
    return kinds


def read(
    folder: Path, weights: LocalWeights, parts: Mapping[str, Tensor], *, stamp: int
) -> dict[str, dict[str, Tensor]]:
    """Read the parts of these names that the folder has, by kind and name.

    DTensors can be read by another number of ranks than wrote them.

    Raises:
        ValueError: If the folder's stamp is not ``stamp``, so that it belongs to another checkpoint.
    """
    reader = SafeReader(folder)
    found: dict[str, Any] = reader.metadata.state_dict_metadata
    keys = dict(zip(parts, weights.checkpoint_tensors(parts), strict=True))
    kinds: dict[str, dict[str, Tensor]] = {"raw": {}, "averaged": {}}
    tensors = {STAMP: torch.tensor(-1, device="cpu")}
    for kind, values in kinds.items():
        entries = {name: found[f"{kind}/{keys[name]}"] for name in parts if f"{kind}/{keys[name]}" in found}
        values.update({name: torch.empty_like(parts[name], dtype=m.properties.dtype) for name, m in entries.items()})
        tensors.update({f"{kind}/{key}": tensor for key, tensor in weights.checkpoint_tensors(values).items()})
    load_safely(tensors, reader)
    if tensors[STAMP].item() != stamp:
        raise ValueError(f"it is from step {tensors[STAMP].item()}, the checkpoint from step {stamp}")
    return kinds
