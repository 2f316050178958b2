"""Adapters in checkpoints: merged into the weights that they were trained for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_tricks.checkpoints.files import PathLike, load, path_of, weights_in
from lightning_tricks.checkpoints.stream import LazyTensor
from lightning_tricks.core.adapters.base import weights_checksum
from lightning_tricks.core.adapters.merge import merged_state
from lightning_tricks.core.adapters.record import Record
from lightning_tricks.core.checks import some


def merged(weights: Mapping[str, Any], record: Record, source: Path, base: PathLike | None) -> dict[str, Any]:
    """The weights of the network without adapters, which do what those with them do.

    Args:
        weights: The state in the checkpoint.
        record: What the checkpoint says of its adapters.
        source: The checkpoint, for error messages.
        base: A file with the weights beside the adapters, under their names in the module; None if the checkpoint has
            them.

    Raises:
        ValueError: If ``base`` is missing, superfluous, or not the file that the adapters were trained with.
    """
    saved = {name: value.read() if isinstance(value, LazyTensor) else value for name, value in weights.items()}
    if not record.checksum:
        if base is not None:
            raise ValueError(
                f"{source} has all weights itself (LoRA(save='all')), got base={str(base)!r}: leave it out."
            )
        return merged_state({}, saved, record)
    if base is None:
        raise ValueError(
            f"{source} has adapters without the frozen weights: pass base=, a file with the module's"
            " state_dict of before the training, as torch.save(module.state_dict(), 'base.pt') writes it."
        )
    file = path_of("base", base)
    state = weights_in(load(file), file)
    replaced = record.without_adapters(saved)
    frozen = {name: value for name, value in state.items() if name not in replaced and isinstance(value, Tensor)}
    if lost := [name for name in (*replaced, *(f"{layer}.weight" for layer in record.layers)) if name not in state]:
        raise ValueError(
            f"{file} has no {some(lost)}, which the module of {source} has: its names must be those of the"
            " LightningModule."
        )
    if (found := weights_checksum(frozen)) != record.checksum:
        raise ValueError(
            f"{file} is not what the adapters of {source} were trained with: its frozen weights have the checksum"
            f" {found}, expected {record.checksum}. Pass the weights of before the training, in their dtypes."
        )
    return {name: value for name, value in merged_state(state, saved, record).items() if name in state}
