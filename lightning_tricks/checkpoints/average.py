"""Averaging the weights of checkpoint files."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.checkpoints.files import PathLike, check_output, is_lightning, load, path_of, save, weights_in
from lightning_tricks.core.adapters.record import found_in
from lightning_tricks.core.checks import check_range, check_type, some
from lightning_tricks.core.report import progress
from lightning_tricks.core.weights.tensors import identity

__all__ = ["average_checkpoints"]

CHUNK = 2**18  # Elements averaged at a time: in double precision they fit into a cache.

# The entries of a Lightning checkpoint that resume training. They belong to one of the models, and an optimizer of one
# model must not be resumed with the weights of another.
TRAINING_STATE = {
    "callbacks",
    "loops",
    "lr_schedulers",
    "optimizer_states",
    "MixedPrecision",
    "current_model_state",  # This entry and the next are those of Lightning's WeightAveraging, and of EMA and SWA.
    "averaging_state",
}


def average_checkpoints(
    paths: Iterable[PathLike], output: PathLike, weights: Sequence[float] | None = None, *, force: bool = False
) -> None:
    """Average the weights of checkpoint files: ``sum(w_i * x_i) / sum(w_i)`` for each tensor x.

    Averaging the last k checkpoints of one run is LAWA; averaging several runs from the same initial weights makes a
    model soup. Each file is a Lightning checkpoint or a plain ``state_dict``, written by ``torch.save`` or as
    .safetensors. From a Lightning checkpoint the weights in its ``state_dict`` are averaged: with ``EMA()`` in the
    Trainer these are averages already.

    Sums are computed in double precision and rounded once, to the dtype of the inputs. Floating-point buffers are
    averaged like weights, including the running statistics of BatchNorm. These approximate the statistics of the
    averaged model, which a pass over the training data in ``train()`` mode would compute. Integers, booleans and
    entries that are not tensors come from the last file. The inputs are memory-mapped: only the averages and a few MiB
    are in memory.

    If the last file is a Lightning checkpoint, so is the output, for ``load_from_checkpoint`` and ``test(ckpt_path=)``.
    It has that file's hyperparameters and other entries, but no state of optimizers, schedulers, callbacks and loops,
    so that no training is resumed from it. Otherwise, and as .safetensors, it is a plain ``state_dict``.

    Args:
        paths: The files. A file that is given twice counts twice.
        output: The file to write, in the format of its suffix. With ``force`` it may be one of ``paths``.
        weights: A relative weight for each file, with a sum above 0; equal weights by default. A negative one moves
            the result away from its file, and may make running variances of BatchNorm negative: recompute them then.
        force: Whether ``output`` may replace a file.

    Raises:
        ValueError: If the files are of different models (by names, shapes and dtypes), are damaged, are not
            checkpoints, or hold objects that could run code; if ``weights`` are out of range or do not match the
            files; if the suffix of ``output`` is unknown.
        TypeError: If ``paths`` is a single path, or a weight is not a number.
        FileNotFoundError: If a file, or the folder of ``output``, does not exist.
        FileExistsError: If ``output`` exists, unless ``force``.
        IsADirectoryError: If a path is a sharded checkpoint: export it to one file first.
        ImportError: If safetensors is missing for a .safetensors file.

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
    files = list_paths(paths)
    factors = _check_weights(weights, len(files))
    target = check_output(output, force=force)
    checkpoints = [load(file) for file in files]
    averaged = mean_state(states_of_one_model(checkpoints, files), factors)
    last = checkpoints[-1]
    if is_lightning(last):
        kept = {name: value for name, value in last.items() if name not in TRAINING_STATE}
        averaged = {**kept, "state_dict": averaged}
    save(averaged, target, force=force)


def list_paths(paths: Iterable[PathLike]) -> list[Path]:
    """The paths as a list.

    Raises:
        TypeError: For a single path.
        ValueError: For an empty list.
    """
    if isinstance(paths, str | os.PathLike | Tensor) or not isinstance(paths, Iterable):
        raise TypeError(f"paths must be a list of files, got {paths!r}.")
    files = [path_of(f"paths[{index}]", path) for index, path in enumerate(paths)]
    if not files:
        raise ValueError("paths must name at least one file, got none.")
    return files


def _check_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """The weights of ``count`` files, scaled to absolute values of at most 1."""
    if weights is None:
        return [1.0] * count
    check_type("weights", weights, list, tuple)
    if len(weights) != count:
        raise ValueError(f"weights must have one value per file, got {len(weights)} for {count} files.")
    for index, weight in enumerate(weights):
        check_range(f"weights[{index}]", weight, -math.inf)
    if sum(weights) <= 0:
        raise ValueError(f"weights must have a sum above 0, got {sum(weights)}.")
    largest = max(map(abs, weights))
    return [weight / largest for weight in weights]


def states_of_one_model(checkpoints: Sequence[dict[str, Any]], files: Sequence[Path]) -> list[dict[str, Any]]:
    """The state_dicts of checkpoints, which must be of the same model.

    Raises:
        ValueError: If the models differ; the message names the difference and the files.
    """
    states = [weights_in(checkpoint, file) for checkpoint, file in zip(checkpoints, files, strict=True)]
    for state, file in zip(states[1:], files[1:], strict=True):
        if difference := _difference(states[0], state):
            raise ValueError(f"{files[0]} and {file} are not of the same model: {difference}.")
    return states


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    if missing := [name for name in first if name not in second]:
        return f"the second has no {some(missing)}"
    if extra := [name for name in second if name not in first]:
        return f"the first has no {some(extra)}"
    pairs = ((name, _kind(first[name]), _kind(second[name])) for name in first)
    return some((f"{name} is {a} and {b}" for name, a, b in pairs if a != b), most=3)


def _kind(value: Any) -> str:
    if record := found_in(value):
        return f"an adapter with alpha={record.alpha} for weights of checksum {record.checksum}"
    if not isinstance(value, Tensor):
        return "not a tensor"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


@torch.no_grad()
def mean_state(states: Sequence[dict[str, Any]], factors: Sequence[float]) -> dict[str, Any]:
    """Average the tensors of several states, ``sum(factor * tensor) / sum(factor)``; tied tensors stay tied."""
    result = copy.copy(states[-1])
    means: dict[Hashable, Tensor] = {}
    for name, last in progress(states[-1].items(), "averaging", len(states[-1])):
        if isinstance(last, Tensor):
            tensors = [state[name] for state in states]
            key = tuple(identity(tensor) for tensor in tensors)
            if key not in means:
                means[key] = mean_tensor(tensors, factors, last.dtype)
            result[name] = means[key]
    return result


def mean_tensor(tensors: Sequence[Tensor], factors: Sequence[float], dtype: torch.dtype) -> Tensor:
    """``sum(factor * tensor) / sum(factor)`` in double precision, rounded to a dtype; a copy of the last integers."""
    last = tensors[-1]
    if not (last.is_floating_point() or last.is_complex()):
        return last.clone()
    double = torch.complex128 if last.is_complex() else torch.float64
    result = torch.empty(last.shape, dtype=dtype)
    columns = zip(*(tensor.reshape(-1).split(CHUNK) for tensor in tensors), strict=True)
    for target, chunks in zip(result.view(-1).split(CHUNK), columns, strict=True):
        total = torch.zeros(target.shape, dtype=double)
        for chunk, factor in zip(chunks, factors, strict=True):
            if factor:  # 0 * inf would be NaN.
                total.add_(chunk.to(double), alpha=factor)
        target.copy_(total.div_(sum(factors)))
    return result
