"""ColOut: an image without some of its rows and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor

from lightning_tricks.core.checks import check_range

__all__ = ["ColOut", "colout"]


def colout(x: Tensor, rows: float = 0.15, columns: float = 0.15, generator: torch.Generator | None = None) -> Tensor:
    """An image without ``floor(rows * H)`` random rows and ``floor(columns * W)`` random columns.

    Args:
        x: An image (..., H, W), of which all channels lose the same.
        rows: Share of the rows to drop, in [0, 1).
        columns: Share of the columns to drop, in [0, 1).
        generator: The generator of the choice, on the CPU; None for torch's own.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or a tensor that has no height and width.

    Example:
        >>> colout(torch.arange(16).view(4, 4), 0.5, 0.25, torch.Generator().manual_seed(0))
        tensor([[ 9, 10, 11],
                [13, 14, 15]])

    References:
        The MosaicML Team, Composer, 2021: ColOut.
    """
    check_range("rows", rows, 0.0, 1.0, below=True)
    check_range("columns", columns, 0.0, 1.0, below=True)
    for dim, kept in zip((-2, -1), _kept(x.shape, rows, columns, generator), strict=True):
        x = x.index_select(dim, kept.to(x.device, non_blocking=True))
    return x


def _kept(
    shape: Sequence[int], rows: float, columns: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """The indices of the rows and the columns that an image keeps."""
    if len(shape) < 2:
        raise ValueError(f"colout needs an image (..., H, W), got {tuple(shape)}.")
    of_rows, of_columns = (
        torch.randperm(size, generator=generator)[int(share * size) :].sort().values
        for size, share in zip(shape[-2:], (rows, columns), strict=True)
    )
    return of_rows, of_columns


@final
@dataclass(frozen=True)
class ColOut:
    """Drops random rows and columns of an image, as a transform for ``BatchTransform`` or a data set.

    An image is a tensor (..., H, W) or one of PIL. All images of a batch become smaller by the same number of rows and
    columns, so that they can be stacked.

    Args:
        rows: Share of the rows to drop, in [0, 1).
        columns: Share of the columns to drop, in [0, 1).

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.

    Example:
        >>> ColOut(0.25, 0.5)(torch.ones(3, 32, 32)).shape
        torch.Size([3, 24, 16])

    References:
        The MosaicML Team, Composer, 2021: ColOut.
    """

    rows: float = 0.15
    columns: float = 0.15

    def __post_init__(self) -> None:
        check_range("rows", self.rows, 0.0, 1.0, below=True)
        check_range("columns", self.columns, 0.0, 1.0, below=True)

    def __call__(self, image: Any) -> Any:
        """The image without some of its rows and columns."""
        if isinstance(image, Tensor):
            return colout(image, self.rows, self.columns)
        if not hasattr(image, "paste"):
            raise TypeError(f"ColOut takes a tensor (..., H, W) or a PIL image, got {type(image).__name__}.")
        rows, columns = _kept((image.height, image.width), self.rows, self.columns)
        image = image.copy()
        for top, first, last in _runs(rows):
            image.paste(image.crop((0, first, image.width, last)), (0, top))
        for left, first, last in _runs(columns):
            image.paste(image.crop((first, 0, last, image.height)), (left, 0))
        return image.crop((0, 0, len(columns), len(rows)))

    def of_batch(self, images: Tensor) -> Tensor:
        """The images (B, ..., H, W), each without rows and columns of its own, as they are if it is done one by one."""
        drawn = [_kept(images.shape[1:], self.rows, self.columns) for _ in images]
        for dim, kept in zip((-2, -1), zip(*drawn, strict=True), strict=True):
            index = torch.stack(kept).to(images.device, non_blocking=True)
            own, full = [len(images), *[1] * (images.ndim - 1)], list(images.shape)
            own[dim], full[dim] = -1, index.shape[1]
            images = images.gather(dim, index.view(own).expand(full))
        return images


def _runs(kept: Tensor) -> Iterator[tuple[int, int, int]]:
    """Neighbours among the indices that are kept: their new place, the first one, and the one after the last."""
    for _, run in groupby(enumerate(kept.tolist()), lambda pair: pair[1] - pair[0]):
        (place, first), *_, (_, last) = [*run] * 2  # of a single one, too
        yield place, first, last + 1
