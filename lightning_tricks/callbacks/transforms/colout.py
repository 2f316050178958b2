"""ColOut: an image without some of its rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

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
    if x.ndim < 2:
        raise ValueError(f"colout needs an image (..., H, W), got {tuple(x.shape)}.")
    for dim, share in ((-2, rows), (-1, columns)):
        size = x.shape[dim]
        kept = torch.randperm(size, generator=generator)[int(share * size) :].sort().values
        x = x.index_select(dim, kept.to(x.device))
    return x


@final
@dataclass(frozen=True)
class ColOut:
    """Drops random rows and columns of an image, as a transform for ``BatchTransform`` or a data set.

    All images of a batch become smaller by the same number of rows and columns, so that they can be stacked.

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

    def __call__(self, image: Tensor) -> Tensor:
        """The image (..., H, W) without some of its rows and columns."""
        return colout(image, self.rows, self.columns)
