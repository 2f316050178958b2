"""Averages of checkpoint files."""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.checkpoints.files import (
    PathLike,
    check_output,
    identity,
    is_lightning,
    load,
    path_of,
    save,
    some,
    weights_in,
)
from lightning_tricks.core.checks import check_range, check_type
from lightning_tricks.core.report import progress

__all__ = ["average_checkpoints"]

PIECE = 2**18  # elements averaged at a time: in double precision they fit into a cache

# What a file saved with save_weights_only=True does not have, and the state of the loops: it belongs to one of the
# models, and nobody shall resume an optimizer of one model with the weights of another.
TRAINING = {
    "callbacks",
    "loops",
    "lr_schedulers",
    "optimizer_states",
    "MixedPrecision",
    "current_model_state",  # of Lightning's own WeightAveraging
    "averaging_state",
}


def average_checkpoints(
    paths: Iterable[PathLike], output: PathLike, weights: Sequence[float] | None = None, *, force: bool = False
) -> None:
    """Average the weights of checkpoint files: ``sum(w_i * x_i) / sum(w_i)`` for each tensor x.

    The last k checkpoints of one run give LAWA, those of several runs from the same initial weights a model soup. Each
    file is a Lightning checkpoint or a plain ``state_dict``, by ``torch.save`` or as .safetensors. Of a Lightning
    checkpoint the weights in its ``state_dict`` are averaged: with ``EMA()`` in the Trainer these are averages already.

    Sums are made in double precision and rounded once, to the dtype of the inputs. Floating-point buffers are averaged
    like weights, the running statistics of BatchNorm too; they are close to the average model's own, which a pass over
    the training data in ``train()`` mode would give. Integers, booleans and what is no tensor come from the last file.
    Inputs are mapped, not read whole: besides the averages themselves only a few MiB are in memory.

    If the last file is a Lightning checkpoint, so is the output, for ``load_from_checkpoint`` and ``test(ckpt_path=)``:
    it has that file's hyperparameters and other entries, but no state of optimizers, schedulers, callbacks and loops,
    so that no training is resumed from it. Otherwise, and as .safetensors, it is a plain ``state_dict``.

    Args:
        paths: The files. One that is given twice counts twice.
        output: The file to write, in the format of its suffix. It may be one of ``paths``, with ``force``.
        weights: A relative weight for each file, at least 0; equal ones if left out.
        force: Whether ``output`` may replace a file.

    Raises:
        ValueError: If the files are of different models (by names, shapes and dtypes), damaged or no checkpoints, or
            hold objects that could run code; for weights that do not fit; for an unknown suffix of ``output``.
        TypeError: If ``paths`` is a single name, or a weight is no number.
        FileNotFoundError: If a file, or the folder of ``output``, does not exist.
        FileExistsError: If ``output`` exists, unless ``force``.
        IsADirectoryError: For a sharded checkpoint: export it to one file first.
        ImportError: For .safetensors, if safetensors is missing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"scale": torch.tensor([1.0, 2.0])}, f"{folder}/a.pt")
        ...     torch.save({"scale": torch.tensor([5.0, 2.0])}, f"{folder}/b.pt")
        ...     average_checkpoints([f"{folder}/a.pt", f"{folder}/b.pt"], f"{folder}/mean.pt", weights=[3, 1])
        ...     torch.load(f"{folder}/mean.pt")
        {'scale': tensor([2., 2.])}

    References:
        Latest weight averaging: Kaddour 2022, arXiv 2209.14981. Model soups: Wortsman et al. 2022, arXiv 2203.05482.
    """
    files = listed(paths)
    factors = _checked(weights, len(files))
    target = check_output(output, force=force)
    checkpoints = [load(file) for file in files]
    averaged = mean(states(checkpoints, files), factors)
    last = checkpoints[-1]
    if is_lightning(last):
        averaged = {**{name: value for name, value in last.items() if name not in TRAINING}, "state_dict": averaged}
    save(averaged, target, force=force)


def listed(paths: Iterable[PathLike]) -> list[Path]:
    """The paths as a list.

    Raises:
        TypeError: If it is one path, not several.
        ValueError: If it is empty.
    """
    if isinstance(paths, str | os.PathLike | Tensor) or not isinstance(paths, Iterable):
        raise TypeError(f"paths must be a list of files, got {paths!r}.")
    files = [path_of(f"paths[{place}]", path) for place, path in enumerate(paths)]
    if not files:
        raise ValueError("paths must name at least one file, got none.")
    return files


def _checked(weights: Sequence[float] | None, count: int) -> list[float]:
    """The weights, the largest of them 1."""
    if weights is None:
        return [1.0] * count
    check_type("weights", weights, list, tuple)
    if len(weights) != count:
        raise ValueError(f"weights must be as many as the files, got {len(weights)} for {count} files.")
    for place, weight in enumerate(weights):
        check_range(f"weights[{place}]", weight, 0.0)
    if not any(weights):
        raise ValueError("weights must not all be 0.")
    return [weight / max(weights) for weight in weights]


def states(checkpoints: Sequence[dict[str, Any]], files: Sequence[Path]) -> list[dict[str, Any]]:
    """The state_dicts of checkpoints of the same model.

    Raises:
        ValueError: If the models differ; it names what differs and the file.
    """
    found = [weights_in(checkpoint, file) for checkpoint, file in zip(checkpoints, files, strict=True)]
    for state, file in zip(found[1:], files[1:], strict=True):
        if difference := _difference(found[0], state):
            raise ValueError(f"{files[0]} and {file} are not of the same model: {difference}.")
    return found


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    if missing := [name for name in first if name not in second]:
        return f"the second has no {some(missing)}"
    if extra := [name for name in second if name not in first]:
        return f"the first has no {some(extra)}"
    pairs = ((name, _kind(first[name]), _kind(second[name])) for name in first)
    return some((f"{name} is {a} and {b}" for name, a, b in pairs if a != b), most=3)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "no tensor"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


@torch.no_grad()
def mean(states: Sequence[dict[str, Any]], factors: Sequence[float]) -> dict[str, Any]:
    """New tensors, each ``sum(factor * tensor) / sum(factor)`` over the states; tied ones stay tied."""
    result = copy.copy(states[-1])
    means: dict[Hashable, Tensor] = {}
    for name, last in progress(states[-1].items(), "averaging", len(states[-1])):
        if isinstance(last, Tensor):
            tensors = [state[name] for state in states]
            same = tuple(identity(tensor) for tensor in tensors)
            if same not in means:
                means[same] = _mean(tensors, factors)
            result[name] = means[same]
    return result


def _mean(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    last = tensors[-1]
    if not (last.is_floating_point() or last.is_complex()):
        return last.clone()
    wide = torch.complex128 if last.is_complex() else torch.float64
    result = torch.empty(last.shape, dtype=last.dtype)
    columns = zip(*(tensor.reshape(-1).split(PIECE) for tensor in tensors), strict=True)
    for target, pieces in zip(result.view(-1).split(PIECE), columns, strict=True):
        total = torch.zeros(target.shape, dtype=wide)
        for piece, factor in zip(pieces, factors, strict=True):
            if factor:  # 0 * inf is not a number
                total.add_(piece.to(wide), alpha=factor)
        target.copy_(total.div_(sum(factors)))
    return result
