"""Batches cut to some of their samples, if every part that depends on samples can be cut.

A part with one entry per sample is cut. A single value (a number, a string, None) is the same for all samples. So are a
few floating-point numbers in a tensor (weights of classes), beside parts that are cut. A longer tensor may hold several
entries per sample (nodes of graphs, tokens), and one of more dimensions or of integers may have the samples elsewhere
or point to them. Such a tensor, an object of an unknown class, and a container of tensors of which none has one entry
per sample may depend on samples in an unknown way: a batch with such a part is refused by its path. So is a symmetric
matrix over pairs of samples (B, B); any other cannot be told from B features of each sample, and is cut like those.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_tricks.core.batches.form import in_class_of, values_of
from lightning_tricks.core.batches.paths import TARGETS, described, fields, find, get, is_read_only, parts, put, walk

Samples = Tensor | slice  # the positions of samples (n,), or a range
_SINGLE = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype, torch.Size)


def select_samples(
    batch: Any,
    samples: Samples,
    size: int,
    trick: str,
    *,
    targets: int = 1,
    remedy: str = "give it one entry per sample",
) -> Any:
    """The batch with some of its samples; containers that change are copied.

    Args:
        batch: A batch of any structure.
        samples: Positions of the samples in [0, ``size``), of shape (n,), or a range of them.
        size: The number of samples in the batch.
        trick: The trick that cuts the batch, for the error message.
        targets: The number of target tensors; something besides them must be cut as well.
        remedy: The remedy for a part that cannot be cut, for the error message.

    Raises:
        MisconfigurationException: If a part may depend on samples and cannot be cut.

    Example:
        >>> batch = {"x": torch.arange(3), "names": ["a", "b", "c"], "scale": 2.0}
        >>> select_samples(batch, torch.tensor([0, 2]), 3, "Doctest")
        {'x': tensor([0, 2]), 'names': ['a', 'c'], 'scale': 2.0}
    """
    cut = _Cut(samples, size, trick, remedy)
    selected = cut.part(batch, "batch")
    if cut.other and cut.count <= targets:
        raise cut.refusal(*cut.other)
    return selected


def count_samples(batch: Any, trick: str) -> int:
    """The number of samples in a batch: the length of its targets, or else of its first two tensors.

    Raises:
        MisconfigurationException: If the lengths differ.
    """
    tensors = [get(batch, path) for path in find(batch, TARGETS, 1)]
    if not tensors and isinstance(batch, list | tuple) and not any(isinstance(part, Tensor) for part in batch):
        tensors = [torch.empty((), device="meta")]  # perhaps one part for each sample
    tensors = tensors or [leaf for _, leaf in walk(batch) if isinstance(leaf, Tensor) and leaf.ndim][:2]
    sizes = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise MisconfigurationException(
            f"{trick} needs targets with one entry per sample, got a batch with {described(batch)}. Give the target one"
            f" of the names {', '.join(map(repr, TARGETS))} in the batch, or put it second in a pair."
        )
    return sizes.pop()


def micro_batches(run: partial[Any], size: int, trick: str, remedy: str) -> list[tuple[float, partial[Any]]]:
    """The share of the samples and the step of each micro-batch.

    Args:
        run: The step, with its batch as the first argument.
        size: The number of samples in a micro-batch; the last one may have fewer.
        trick: The trick that cuts the batch, for the error message.
        remedy: The remedy for a part that cannot be cut, for the error message.

    Raises:
        MisconfigurationException: If the batch cannot be cut.
    """
    batch, *rest = run.args
    samples = count_samples(batch, trick)
    parts: list[tuple[float, partial[Any]]] = []
    for start in range(0, samples, size):
        stop = min(start + size, samples)
        part = select_samples(batch, slice(start, stop), samples, trick, remedy=remedy)
        parts.append(((stop - start) / samples, partial(run.func, part, *rest, **run.keywords)))
    return parts


def is_pairwise(x: Tensor, size: int) -> bool:
    """Whether a tensor has entries (B, B, ...) for pairs of B = ``size`` samples, by its symmetry, which is no chance.

    With B features for each of B samples, symmetry has the probability ``2 ** -bits``, where ``bits`` is the entropy of
    the entries above the diagonal. Few or nearly equal entries decide nothing. Windows of one series, each a step after
    the one before, are symmetric as well, and are no pairs.

    Example:
        >>> distances = torch.cdist(points := torch.rand(8, 2), points)
        >>> is_pairwise(distances, 8), is_pairwise(torch.eye(8), 8), is_pairwise(torch.rand(8, 8), 8)
        (True, False, False)
    """
    if not (has_entries_for_pairs(x, size) and is_symmetric(x)):
        return False
    x = values_of(x)
    rows, columns = torch.triu_indices(size, size, 1, device=x.device)
    counts = x[rows, columns].unique(dim=0, return_counts=True)[1].float()
    return bool((counts * (counts.sum() / counts).log2()).sum() >= _BITS)


def has_entries_for_pairs(x: Tensor, size: int) -> bool:
    """Whether a tensor (B, B, ...) has the shape of one with entries for pairs of samples."""
    return not x.is_nested and x.layout == torch.strided and x.shape[:2] == (size, size) and size >= _FEWEST


def is_symmetric(x: Tensor) -> bool:
    """Whether entries (B, B, ...) are symmetric, but for windows of one series; the host waits for the device once."""
    x = values_of(x)
    return bool((x == x.transpose(0, 1)).all() & (x[1:, :-1] != x[:-1, 1:]).any())


_BITS = 24.0  # of the entropy of a symmetric matrix, from which on its symmetry is no chance: 6e-8
_FEWEST = 5  # samples of which different pairs have so much


@contextmanager
def naming_single_samples(rule: str, remedy: str) -> Iterator[None]:
    """A context in which the error of BatchNorm, which cannot train on one sample, says where that comes from.

    Args:
        rule: What leaves one sample.
        remedy: What to do about it.
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise MisconfigurationException(f"{rule}, on which its BatchNorm cannot train: {remedy}.") from error


class _Cut:
    """Cuts the parts of one batch, and counts them."""

    def __init__(self, samples: Samples, size: int, trick: str, remedy: str) -> None:
        self.samples, self.size, self.trick, self.remedy = samples, size, trick, remedy
        self.count = 0  # number of parts that were cut
        self.other: tuple[Any, str] | None = None  # the last array of another length and its path

    def part(self, part: Any, path: str) -> Any:
        """A part of the batch, cut to the samples."""
        if isinstance(part, PackedSequence) or (isinstance(part, Tensor) and part.is_nested):
            raise self.refusal(part, path)
        if (
            hasattr(type(part), "batch_size")
            and isinstance(part.batch_size, torch.Size)
            and part.batch_size[:1] == (self.size,)
        ):
            self.count += 1
            return part[self.samples]  # a TensorDict, or a class like it
        if isinstance(part, Tensor) or (type(part).__module__ == "numpy" and hasattr(part, "shape")):
            return self._array(part, path)
        if isinstance(part, _SINGLE) or (isinstance(part, Sequence | dict) and not len(part)):
            return part
        if has_one_entry_a_sample(part, self.size):
            self.count += 1
            numbers = range(self.size)[self.samples] if isinstance(self.samples, slice) else self.samples.tolist()
            return type(part)([part[number] for number in numbers])
        return self._container(part, path)

    def _array(self, array: Any, path: str) -> Any:
        if not array.shape:
            return array
        if array.shape[0] > self.size or (array.shape[0] not in (1, self.size) and _has_indices(array)):
            raise self.refusal(array, path)
        if isinstance(array, Tensor) and is_pairwise(array, self.size):
            raise self.refusal(array, path)
        if array.shape[0] < self.size:
            self.other = array, path
            return array
        self.count += 1
        if isinstance(array, Tensor) and array.layout != torch.strided:  # sparse tensors cannot be sliced
            positions = torch.arange(self.size, device=array.device)[self.samples]
            return array.index_select(0, positions)
        if isinstance(array, Tensor):
            return in_class_of(array[self.samples], array, path, self.trick)
        return array[self.samples if isinstance(self.samples, slice) else self.samples.cpu().numpy()]

    def _container(self, container: Any, path: str) -> Any:
        inner = list(parts(container))
        if not inner or is_read_only(container):
            raise self.refusal(container, path)
        count, other = self.count, self.other
        self.other = None
        for name, value in inner:
            new = self.part(value, f"{path}[{name!r}]")
            if new is not value:
                container = put(container, (name,), new)
        if self.other and self.count == count and path != "batch":
            raise self.refusal(*self.other)
        self.other = self.other or other
        return container

    def refusal(self, part: Any, path: str) -> MisconfigurationException:
        """The error for a part that may depend on samples and cannot be cut."""
        nested = isinstance(part, Tensor) and part.is_nested
        found = f"a tensor {tuple(part.shape)}" if not nested and hasattr(part, "shape") else f"a {type(part).__name__}"
        return MisconfigurationException(
            f"{self.trick} cuts a batch of {self.size} samples, and cannot know how samples are stored in {path},"
            f" {found}: {self.remedy}. What is the same for all samples belongs in the module (register_buffer)."
        )


def _has_indices(array: Any) -> bool:
    """Whether an array of fewer entries than samples may have them in another dimension, or point to them."""
    return array.ndim > 1 or "int" in str(array.dtype)


def has_one_entry_a_sample(part: Any, size: int) -> bool:
    """Whether a list or tuple has one entry per sample, and is not a list of columns.

    As many columns as samples are told from tensors of different lengths, of which some have as many entries as there
    are samples, by their dtypes and dimensions; three columns of three samples are told from images (3, H, W) by those.
    """
    if not isinstance(part, tuple | list) or fields(part) or len(part) != size:
        return False
    columns = [isinstance(value, Tensor) and value.shape[:1] == (size,) for value in part]
    if all(columns):
        return size == 3 and all(value.ndim == 3 and min(value.shape[1:]) > 4 for value in part)
    return (
        not any(columns) or len({(value.dtype, value.ndim) if isinstance(value, Tensor) else 0 for value in part}) == 1
    )
