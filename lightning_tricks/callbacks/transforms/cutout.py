"""CutOut: a square of an image is set to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_tricks.core.checks import check_range

__all__ = ["CutOut", "cutout"]


def cutout(x: Tensor, length: float = 0.5, generator: torch.Generator | None = None) -> Tensor:
    """Set a square at a random place of an image to zero, in a new tensor; at the borders it is cut off.

    Args:
        x: An image (..., H, W), of which all channels lose the same square.
        length: Side of the square, as a share of the shorter side of the image, in [0, 1].
        generator: The generator of the place, on the CPU; None for torch's own.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or a tensor that has no height and width.

    Example:
        >>> cutout(torch.ones(4, 4), 0.5, torch.Generator().manual_seed(0))
        tensor([[1., 1., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 1., 1.],
                [1., 1., 1., 1.]])

    References:
        DeVries and Taylor, arXiv 1708.04552.
    """
    check_range("length", length, 0.0, 1.0)
    if x.ndim < 2:
        raise ValueError(f"cutout needs an image (..., H, W), got {tuple(x.shape)}.")
    side, x = round(length * min(x.shape[-2:])), x.clone()
    centres = torch.rand(2, generator=generator).tolist()
    top, left = (int(centre * size) - side // 2 for centre, size in zip(centres, x.shape[-2:], strict=True))
    x[..., max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
    return x


@final
@dataclass(frozen=True)
class CutOut:
    """Sets a square at a random place of an image to zero, as a transform for ``BatchTransform`` or a data set.

    Args:
        length: Side of the square, as a share of the shorter side of the image, in [0, 1]; 0 changes nothing.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.

    Example:
        >>> CutOut(0.25)(torch.ones(3, 32, 32)).shape
        torch.Size([3, 32, 32])

    References:
        DeVries and Taylor, arXiv 1708.04552.
    """

    length: float = 0.5

    def __post_init__(self) -> None:
        check_range("length", self.length, 0.0, 1.0)

    def __call__(self, image: Tensor) -> Tensor:
        """The image (..., H, W) with a square of zeros."""
        return cutout(image, self.length)
