"""The folds of a cross-validation: made by a splitter, checked, and written down so that they stay the same."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_tricks.core.checks import check_count
from lightning_tricks.core.install import library


class Fold(NamedTuple):
    """The samples of a fold, by their positions in the data set.

    Args:
        train: Positions of the samples to train with.
        validation: Positions of the samples to validate and predict, none of them in ``train``.
    """

    train: list[int]
    validation: list[int]


def make_folds(splitter: Any, samples: int, targets: Any = None, groups: Any = None, seed: int = 0) -> list[Fold]:
    """The folds of a splitter; an int stands for ``KFold(splitter, shuffle=True, random_state=seed)``.

    Args:
        splitter: Number of folds, or an object of ``sklearn.model_selection`` or with its method ``split``.
        samples: Number of samples in the data set.
        targets: Target of each sample (n,), for splitters that stratify.
        groups: Group of each sample (n,), for splitters that keep groups together.
        seed: Seed of an int's folds, and of a splitter whose ``random_state`` is None.

    Raises:
        TypeError: If ``splitter`` has no method ``split``.
        ValueError: For fewer than two folds, targets or groups of another length, and folds that are empty, have the
            same sample on both sides, or samples that the data set does not have.
    """
    import numpy

    for name, values in (("targets", targets), ("groups", groups)):
        if values is None:
            continue
        try:
            found = len(values)
        except TypeError as error:
            raise TypeError(f"{name} must have one entry per sample, got {values!r}.") from error
        if found != samples:
            raise ValueError(f"{name} must have one entry per sample, got {found} for {samples} samples.")
    if isinstance(splitter, int):
        check_count("splitter", splitter, least=2)
        if groups is not None:
            raise ValueError(f"splitter={splitter} ignores groups: pass a splitter that uses them, as GroupKFold().")
        if splitter > samples:
            raise ValueError(f"splitter={splitter} folds need as many samples, got {samples}.")
        splitter = library("sklearn.model_selection", "cross_validate", "evaluation").KFold(
            splitter, shuffle=True, random_state=seed
        )
    if isinstance(splitter, str | Tensor) or not callable(getattr(splitter, "split", None)):  # theirs is another one
        raise TypeError(f"splitter must be an int or have a method split, as sklearn's KFold(), got {splitter!r}.")
    values = [None if values is None else numpy.asarray(values) for values in (targets, groups)]
    with isolate_rng(include_cuda=False):
        numpy.random.seed(seed)
        folds = [
            Fold(list(map(int, a)), list(map(int, b))) for a, b in splitter.split(numpy.zeros((samples, 1)), *values)
        ]
    for number, fold in enumerate(folds):
        _check(fold, number, samples)
    if len(folds) < 2:
        raise ValueError(f"splitter must make at least 2 folds, got {len(folds)} from {splitter!r}.")
    return folds


def _check(fold: Fold, number: int, samples: int) -> None:
    both = {*fold.train, *fold.validation}
    if not fold.train or not fold.validation:
        raise ValueError(
            f"fold {number} of splitter has {len(fold.train)} samples to train with and"
            f" {len(fold.validation)} to validate: it needs both."
        )
    if shared := {*fold.train} & {*fold.validation}:
        raise ValueError(
            f"fold {number} of splitter trains with samples that it validates, as {min(shared)}: these"
            " must not overlap."
        )
    if len({*fold.validation}) < len(fold.validation):
        raise ValueError(f"fold {number} of splitter validates a sample twice: it must name each once.")
    if min(both) < 0 or max(both) >= samples:
        raise ValueError(
            f"fold {number} of splitter has samples from {min(both)} to {max(both)}, the data set has"
            f" {samples}: make folds for this data set."
        )


def fingerprint(values: Any) -> str | None:
    """A checksum of targets, groups or positions; equal for equal values in a list, an array or a tensor."""
    if values is None:
        return None
    plain = values.tolist() if hasattr(values, "tolist") else [v.item() if hasattr(v, "item") else v for v in values]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]
