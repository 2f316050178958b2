"""CutOut: a square of an image is set to zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

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
    (top, bottom), (left, right) = _square(x.shape, length, generator)
    x = x.clone()
    x[..., top:bottom, left:right] = 0
    return x


def _square(shape: Sequence[int], length: float, generator: torch.Generator | None = None) -> list[tuple[int, int]]:
    """The first row and column of a square, and those after its last."""
    if len(shape) < 2:
        raise ValueError(f"cutout needs an image (..., H, W), got {tuple(shape)}.")
    side, centres = round(length * min(shape[-2:])), torch.rand(2, generator=generator).tolist()
    first = [int(centre * size) - side // 2 for centre, size in zip(centres, shape[-2:], strict=True)]
    return [(max(place, 0), max(place + side, 0)) for place in first]


@final
@dataclass(frozen=True)
class CutOut:
    """Sets a square at a random place of an image to zero, as a transform for ``BatchTransform`` or a data set.

    An image is a tensor (..., H, W) or one of PIL.

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

    def __call__(self, image: Any) -> Any:
        """The image with a square of zeros."""
        if isinstance(image, Tensor):
            return cutout(image, self.length)
        if not hasattr(image, "paste"):
            raise TypeError(f"CutOut takes a tensor (..., H, W) or a PIL image, got {type(image).__name__}.")
        (top, bottom), (left, right) = _square((image.height, image.width), self.length)
        image = image.copy()
        image.paste(0, (left, top, min(right, image.width), min(bottom, image.height)))
        return image

    def of_batch(self, images: Tensor) -> Tensor:
        """The images (B, ..., H, W), each with a square of its own, as they are if they are cut one by one."""
        squares = torch.tensor([_square(images.shape[1:], self.length) for _ in images])
        first, last = squares.to(images.device, non_blocking=True)[..., None].unbind(2)
        places = [torch.arange(size, device=images.device) for size in images.shape[-2:]]
        rows, columns = ((first[:, n] <= place) & (place < last[:, n]) for n, place in enumerate(places))
        inside = (rows[:, :, None] & columns[:, None]).unflatten(0, (-1, *[1] * (images.ndim - 3)))
        return images.masked_fill(inside, 0)
