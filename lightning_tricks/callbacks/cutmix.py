"""CutMix: a box of each image comes from another one."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.mixing import Drawn, MixingCallback, permutation
from lightning_tricks.core.batches.paths import Names, put
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_range

__all__ = ["CutMix", "cutmix"]


def cutmix(x: Tensor, lam: float, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, float]:
    """Images with a box from another one, in a new tensor, and the share that is left of each image itself.

    The box has ``sqrt(1 - lam)`` of height and width around a uniformly drawn centre and is cut off at the borders.
    ``lam`` becomes what is left exactly: ``1 - box / (H * W)``.

    Args:
        x: Images (B, ..., H, W).
        lam: The share that each image keeps, in [0, 1].
        index: The partner of each image (B,).
        generator: Draws the centre, on the CPU; torch's own if left out.

    Returns:
        The images and ``lam``.

    Raises:
        ValueError: For a tensor that has no height and width.

    Example:
        >>> x = torch.stack([torch.zeros(4, 4), torch.ones(4, 4)])
        >>> mixed, lam = cutmix(x, 0.75, torch.tensor([1, 0]))
        >>> bool(mixed[0].mean() == 1 - lam)
        True

    References:
        Yun et al., arXiv 1905.04899.
    """
    check_range("lam", lam, 0.0, 1.0)
    if x.ndim < 3:
        raise ValueError(f"cutmix needs images (B, ..., H, W), got {tuple(x.shape)}.")
    height, width = x.shape[-2:]
    down, across = torch.rand(2, generator=generator).tolist()
    (top, bottom), (left, right) = _extent(down, height, lam), _extent(across, width, lam)
    mixed = x.clone()
    box, part = mixed[..., top:bottom, left:right], x[..., top:bottom, left:right]
    # at once takes half the time; autograd does not know it, and an index of another length would resize the box
    if x.is_cpu and not x.requires_grad and len(index) == len(x):
        torch.index_select(part, 0, index, out=box)
    else:
        box.copy_(part.index_select(0, index))
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def _extent(centre: float, size: int, lam: float) -> tuple[int, int]:
    length = round(size * math.sqrt(1 - lam))
    begin = int(centre * size) - length // 2
    return max(begin, 0), min(begin + length, size)


@final
class CutMix(MixingCallback):
    """Trains on images with a box from another image of the batch; the loss is mixed by the areas.

    ``loss = lam * L(f(x'), y) + (1 - lam) * L(f(x'), y[index])`` with ``lam ~ Beta(alpha, alpha)``, made exact for the
    box that was cut (see ``cutmix``). The target looks like the label of the greater part. All else is as with
    ``Mixup``; with both, one of them is chosen for each batch, by their ``prob``.

    Args:
        alpha: Of the Beta distribution, at least 0; 1 draws areas uniformly, 0 mixes nothing.
        prob: Share of the batches that are mixed, in [0, 1].
        start: When mixing begins (int optimizer steps, float fraction of training).
        stop: When it ends, as ``start``.
        inputs: Key, index or path (such as "batch.0") of the images (B, ..., H, W), or a list of those; found by itself
            in pairs and under usual names.
        target: The same for the targets.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: As with ``Mixup``, and for inputs that are no images.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[CutMix(prob=0.5)], accelerator="cpu", logger=False)

    References:
        Yun et al., arXiv 1905.04899.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        prob: float = 1.0,
        start: int | float = 0,
        stop: int | float = 1.0,
        inputs: Names = None,
        target: Names = None,
    ) -> None:
        self.alpha, self.prob = alpha, prob
        self.start, self.stop, self.inputs, self.target = start, stop, inputs, target
        super().__init__()

    @override
    def _mix(self, context: BatchContext, lam: float, size: int) -> Drawn:
        inputs = self._inputs(context, size)
        if len({x.shape[-2:] for _, x in inputs}) > 1 or any(x.ndim < 3 for _, x in inputs):
            raise self._cannot("needs images (B, ..., H, W) of one size", context)
        index = permutation(context.numbers, inputs[0][1])
        seed = context.numbers.getrandbits(63)
        for path, x in inputs:  # the same box in all
            mixed, share = cutmix(x, lam, index, torch.Generator().manual_seed(seed))
            context.batch = put(context.batch, path, mixed)
        return Drawn(share, index)
