"""Progressive resizing: smaller images first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.form import in_form_of
from lightning_tricks.core.batches.growing import GrowingInputs
from lightning_tricks.core.batches.images import masks_of, require_images, rows_and_columns
from lightning_tricks.core.batches.paths import Names, get, put, spelled
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_choice, check_count

__all__ = ["ProgressiveResizing", "resize_images"]


def resize_images(x: Tensor, size: Sequence[int], *, mode: Literal["bilinear", "nearest"] = "bilinear") -> Tensor:
    """Images of another height and width: bilinear with antialiasing, or the nearest pixels of a mask.

    Args:
        x: Images (B, ..., H, W) of any dtype; integers are rounded.
        size: The new height and width, at least 1.
        mode: "bilinear" for images, "nearest" for masks, which keeps their values.

    Returns:
        The images (B, ..., *size) in their dtype.

    Raises:
        ValueError: For a tensor that has no height and width, or an unknown mode.

    Example:
        >>> resize_images(torch.arange(16.0).view(1, 4, 4), (2, 2), mode="nearest")
        tensor([[[ 5.,  7.],
                 [13., 15.]]])
    """
    check_choice("mode", mode, ("bilinear", "nearest"))
    for side in size:
        check_count("size", side)
    if x.ndim < 3:
        raise ValueError(f"resize_images needs images (B, ..., H, W), got {tuple(x.shape)}.")
    if mode == "nearest":  # the centre of a new pixel is in this old one
        rows, columns = (
            ((torch.arange(new, device=x.device) + 0.5) * (old / new)).long()
            for new, old in zip(size, x.shape[-2:], strict=True)
        )
        return x[..., rows[:, None], columns]
    images = x if x.ndim == 4 else x.flatten(0, -3)[:, None]
    if x.dtype not in (torch.float32, torch.float64):  # torch has no other on a CPU
        images = images.float()
    images = F.interpolate(images, tuple(size), mode="bilinear", antialias=True)
    images = (images if x.is_floating_point() else images.round()).to(x.dtype)
    return images if x.ndim == 4 else images.view(*x.shape[:-2], *size)


@final
class ProgressiveResizing(GrowingInputs):
    """Trains on small images first, which takes less time: height and width grow to the loader's.

    ``side = (initial + (1 - initial) * (step - start) / (stop - start)) * full side``, rounded to ``multiple_of``;
    ``initial`` of it before ``start``, the full one from ``stop`` on. It is the same within an accumulation window and
    on all ranks, and resumed exactly. Validation has full images. Masks and other targets with the height and width of
    the images get the same by their nearest pixels; boxes, keypoints and other parts that belong to places in the
    images are refused by their path. Labels stay. The network must take images of any such size, as convolutions before
    a global pooling do.

    Beside ``Compile`` there are at most 8 sizes for a full one: growth is in seven equal stages. Choose ``multiple_of``
    accordingly where you call ``torch.compile`` yourself.

    Args:
        initial: Share of height and width at first, in (0, 1]; 1.0 changes nothing.
        start: When growth begins (int optimizer steps, float fraction of training).
        stop: When images have their full size, in the form of ``start``.
        multiple_of: The number of which smaller heights and widths are multiples: the stride of the network.
        mode: "resize" (bilinear, with antialiasing) or "crop", the same random place in all images of a batch.
        inputs: Key, index or path (such as "batch.0") of the images (B, ..., H, W), or a list of those; None to find
            them in pairs and under usual names.
        target: Key, index or path of the targets, in the same form.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At the first batch, if there are no images, if they are no larger than
            ``multiple_of``, or for a part that cannot be resized with them; when training starts, for a fraction of a
            training whose length is unknown.

    Example:
        >>> import lightning as L
        >>> growth = ProgressiveResizing(0.5, stop=0.8)
        >>> trainer = L.Trainer(callbacks=[growth], accelerator="cpu", logger=False)

    References:
        Howard, fast.ai's DAWNBench entry, 2018; Tan and Le, EfficientNetV2, arXiv 2104.00298; Touvron et al., Fixing
        the train-test resolution discrepancy, arXiv 1906.06423.
    """

    def __init__(
        self,
        initial: float = 0.5,
        *,
        start: int | float = 0,
        stop: int | float = 0.8,
        multiple_of: int = 32,
        mode: Literal["resize", "crop"] = "resize",
        inputs: Names = None,
        target: Names = None,
    ) -> None:
        check_choice("mode", mode, ("resize", "crop"))
        self.initial, self.multiple_of, self.mode = initial, multiple_of, mode
        self.start, self.stop, self.inputs, self.target = start, stop, inputs, target
        super().__init__()

    @override
    def _shrunk(self, context: BatchContext, size: Callable[[int], int]) -> Any:
        batch, images = context.batch, self.inputs_in(context.batch)
        sides = require_images(batch, images, "ProgressiveResizing")
        remedy = "leave it out of the batch, or remove ProgressiveResizing"
        masks = masks_of(batch, images, self.targets_if_any(batch), "ProgressiveResizing", remedy)
        if max(sides) <= self.multiple_of:
            raise MisconfigurationException(
                f"ProgressiveResizing(multiple_of={self.multiple_of}) needs images that are larger, got {tuple(sides)}:"
                " nothing would grow. Give the stride of the network as multiple_of."
            )
        height, width = map(size, sides)
        top, left = (context.numbers.randrange(1 + old - new) for old, new in zip(sides, (height, width), strict=True))
        for path in (*images, *masks):
            x = get(batch, path)
            places = rows_and_columns(x, sides)
            assert places is not None
            small = x.movedim(places, (-2, -1))
            if self.mode == "crop":
                small = small[..., top : top + height, left : left + width]
            elif (height, width) != sides:
                small = resize_images(small, (height, width), mode="nearest" if path in masks else "bilinear")
            small = in_form_of(small.movedim((-2, -1), places), x, spelled(path), "ProgressiveResizing")
            batch = put(batch, path, small)
        return batch
