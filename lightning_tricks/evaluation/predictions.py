"""Predictions of batches, ranks and folds put together in the order of the data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Leaf = Callable[[list[Tensor], str], Any]


def combine(outputs: Sequence[Any], leaf: Leaf, path: str = "predict_step's output") -> Any:
    """Combine outputs of one structure of tensors, tuples, lists and dictionaries: ``leaf`` combines their tensors.

    Raises:
        TypeError: If a part is something else.
        ValueError: If the structures differ.

    Example:
        >>> combine([(torch.ones(1), {"x": torch.ones(2)})], lambda tensors, path: path)
        ("predict_step's output[0]", {'x': "predict_step's output[1]['x']"})
    """
    first = outputs[0]
    if isinstance(first, Tensor) and all(isinstance(output, Tensor) for output in outputs):
        return leaf([*outputs], path)
    if not isinstance(first, Mapping | tuple | list):
        raise TypeError(
            f"{path} must be a tensor, or a tuple, list or dictionary of tensors, got {type(first).__name__}: convert"
            " it in predict_step, or pass predict=False."
        )
    keys = _keys(first)
    for output in outputs:
        if type(output) is not type(first) or {*_keys(output)} != {*keys}:
            raise ValueError(
                f"{path} must have the same structure for all batches, got {first!r:.60} and {output!r:.60}."
            )
    parts = [combine([output[key] for output in outputs], leaf, f"{path}[{key!r}]") for key in keys]
    if isinstance(first, Mapping):
        return dict(zip(keys, parts, strict=True))
    return tuple(parts) if isinstance(first, tuple) else parts


def _keys(part: Any) -> list[Any]:
    return list(part) if isinstance(part, Mapping) else list(range(len(part)))


def joined(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of batches one after the other, ``sizes[i]`` samples in batch i.

    Raises:
        ValueError: For a tensor without an entry per sample, or with other entries in another batch.

    Example:
        >>> joined([torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])], [1, 2]).tolist()
        [[1.0], [2.0], [3.0]]
    """

    def leaf(tensors: list[Tensor], path: str) -> Tensor:
        for tensor, size in zip(tensors, sizes, strict=True):
            if tensor.dim() == 0 or len(tensor) != size or tensor.shape[1:] != tensors[0].shape[1:]:
                raise ValueError(
                    f"{path} must have one entry per sample, all of one shape, got {tuple(tensor.shape)} for a batch of"
                    f" {size}, beside {tuple(tensors[0].shape)} for one of {sizes[0]}: pad it, or pass predict=False."
                )
        return torch.cat(tensors)

    return combine(batches, leaf)


def in_order(outputs: Any, positions: Sequence[int]) -> Any:
    """Outputs sorted by the positions of their samples."""
    order = torch.tensor(positions).argsort()
    return combine([outputs], lambda tensors, path: tensors[0][order])


def require_mean(outputs: Any) -> None:
    """Raise unless the mean of several predictions of a sample means something.

    Raises:
        ValueError: For integers, such as the number of a class.
    """

    def leaf(tensors: list[Tensor], path: str) -> None:
        if not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            raise ValueError(
                f"{path} is of {tensors[0].dtype}, and the splitter predicts a sample several times: their mean needs"
                " floating-point numbers, such as probabilities. Return those, or pass predict=False."
            )

    combine([outputs], leaf)


def out_of_fold(folds: Sequence[tuple[Sequence[int], Any]], samples: int) -> Any:
    """Predictions of all samples, in the order of the data set.

    A sample that several folds predict has the mean of its predictions. One that none predicts has NaN, for which
    integers become fp64.

    Args:
        folds: The positions (m,) of the samples of each fold, and their predictions, each tensor (m, ...).
        samples: The number n of samples in the data set.

    Returns:
        The predictions in the structure of ``predict_step``'s output, each tensor (n, ...).

    Example:
        >>> out_of_fold([([2], torch.tensor([5.0])), ([0, 2], torch.tensor([1.0, 7.0]))], 3)
        tensor([1., nan, 6.])
    """
    positions = torch.cat([torch.tensor(fold) for fold, _ in folds])
    counts = torch.bincount(positions, minlength=samples)

    def leaf(tensors: list[Tensor], path: str) -> Tensor:
        values = torch.cat(tensors)
        if not (counts == 0).any() and counts.max() == 1:
            return values[positions.argsort()]
        exact = values if values.is_complex() else values.double()
        total = exact.new_zeros(samples, *values.shape[1:]).index_add_(0, positions, exact)
        mean = total / counts.view(-1, *[1] * (values.dim() - 1))  # 0 / 0 is NaN
        return mean if not (values.is_floating_point() or values.is_complex()) else mean.to(values.dtype)

    return combine([outputs for _, outputs in folds], leaf)
