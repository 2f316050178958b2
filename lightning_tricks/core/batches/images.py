"""Height and width in a batch: its images, the masks that have the same sides, and parts that would stay behind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.batches.paths import Path, described, get, spelled, walk

_COORDINATES = re.compile(r"(^|[^a-z])(b?box(es)?|key_?points?|landmarks?|polygons?)($|[^a-z])", re.IGNORECASE)


def require_images(batch: Any, images: Sequence[Path], trick: str) -> torch.Size:
    """The height and width of the images in a batch.

    Args:
        batch: A batch of any structure.
        images: The paths of the images.
        trick: The trick that changes them, for the error message.

    Raises:
        MisconfigurationException: If the inputs are no images (B, ..., H, W) of one size.
    """
    found = [(path, get(batch, path)) for path in images]
    sides = {torch.Size() if x.is_nested else x.shape[-2:] for _, x in found}
    if len(sides) > 1 or any(x.is_nested or x.ndim < 3 for _, x in found):
        raise MisconfigurationException(
            f"{trick} needs images (B, ..., H, W) of one size. The batch has {described(batch)}."
        )
    for path, x in found:
        if _has_channels_last(x):
            raise MisconfigurationException(
                f"{trick} needs images (B, ..., H, W), got {spelled(path)}, a tensor {tuple(x.shape)}, which looks like"
                " (B, H, W, C): move the channels after the samples, by movedim(-1, 1), in the data set or in"
                f" on_after_batch_transfer. The batch has {described(batch)}."
            )
    return sides.pop()


def masks_of(batch: Any, images: Sequence[Path], targets: Sequence[Path], trick: str, remedy: str) -> list[Path]:
    """The targets that are masks, with the height and width of the images.

    Args:
        batch: A batch of any structure.
        images: The paths of the images, all of one size.
        targets: The paths of the targets.
        trick: The trick that changes images and masks, for the error message.
        remedy: What to do about a part that belongs to places in the image and cannot be changed with it.

    Raises:
        MisconfigurationException: For a part that belongs to places in the image, and is neither an image nor a mask.
    """
    sides, masks = require_images(batch, images, trick), []
    volumes = [get(batch, path).shape[2:] for path in images if get(batch, path).ndim > 4]
    for path, part in walk(batch):
        is_spatial = isinstance(part, Tensor) and rows_and_columns(part, sides) is not None
        found = f"{spelled(path)}, {f'a tensor {tuple(part.shape)}' if isinstance(part, Tensor) else type(part)}"
        problem = None
        could_be_both = is_spatial and part.ndim > 3 and part.shape[1:3] == part.shape[-2:] == sides
        if path in targets and could_be_both and part.shape[1:] not in volumes:
            problem = (
                f"cannot know which dimensions are height and width in {found}: make it a mask of labels without"
                " channels, give volumes a dimension for them, (B, 1, D, H, W), or use images of another size"
            )
        elif path in images:
            continue
        elif path in targets and is_spatial:
            masks.append(path)
        elif is_spatial:
            problem = (
                f"does not change {found}, which has the size of the images: name it in target= if it is a mask, in"
                " inputs= if it is an image, or remove it from the batch"
            )
        elif is_geometry(path, part) or (path in targets and part.ndim > 2):
            problem = (
                f"changes images and masks of the same size beside labels (B,) and (B, C); it cannot change {found}:"
                f" {remedy}"
            )
        if problem:
            raise MisconfigurationException(f"{trick} {problem}. The batch has {described(batch)}.")
    return masks


def rows_and_columns(x: Tensor, sides: torch.Size) -> tuple[int, int] | None:
    """The dimensions in which a tensor (B, ..., H, W) or (B, H, W, ...) has the height and width of an image."""
    if x.ndim >= 3 and x.shape[-2:] == sides:
        return -2, -1
    return (1, 2) if x.ndim >= 3 and x.shape[1:3] == sides else None


def is_geometry(path: Path, part: Any) -> bool:
    """Whether a part of a batch holds coordinates in an image, by its name or its class."""
    names = [name for name in path if isinstance(name, str)]
    return type(part).__name__ in ("BoundingBoxes", "KeyPoints") or any(map(_COORDINATES.search, names))


def _has_channels_last(x: Tensor) -> bool:
    """Whether a tensor has as few entries as there are colours in its last dimension alone."""
    return x.ndim > 3 and x.shape[-1] in (1, 3, 4) and min(x.shape[1], x.shape[-2]) > 4
