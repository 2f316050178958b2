"""CutMix: a box of every image comes from another image."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.form import in_form_of, plain
from lightning_tricks.core.batches.images import masks_of, require_images, rows_and_columns
from lightning_tricks.core.batches.mixing import Drawn, MixingCallback, permutation
from lightning_tricks.core.batches.paths import Names, Path, get, put, spelled
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_range

__all__ = ["CutMix", "cutmix"]


def cutmix(x: Tensor, lam: float, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, float]:
    """Paste a box from another image into every image, in a new tensor.

    The box has ``sqrt(1 - lam)`` of height and width around a uniformly drawn centre, and is cut off at the borders.
    The returned ``lam`` is exact: ``1 - box / (H * W)``.

    Args:
        x: Images (B, ..., H, W).
        lam: The share that an image keeps, in [0, 1].
        index: The indices of the partners (B,).
        generator: The generator of the centre, on the CPU; None for torch's own.

    Returns:
        The images with boxes, and the exact share that an image keeps.

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
    # One operation takes half the time, but has no gradient, and an index of another length would resize the box.
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
    """Trains on images with a box from another image of the batch; losses are mixed by area, and masks are pasted.

    ``loss = lam * L(f(x'), y) + (1 - lam) * L(f(x'), y[index])`` with ``lam ~ Beta(alpha, alpha)``, made exact for the
    box (see ``cutmix``). The target looks like the label of the larger part. A target with the height and width of the
    images, such as a mask (B, H, W), (B, C, H, W) or (B, H, W, C), gets the same box from its partner, and its loss is
    not changed. Images with channels in the last dimension are refused if it has 1, 3 or 4 entries; with another number
    they look like (B, C, H, W), so move the channels. All else is as with ``Mixup``; with both, one of them is chosen
    for every batch, by their ``prob``.

    Args:
        alpha: Parameter of the Beta distribution, at least 0; 1 draws areas uniformly, 0 mixes nothing.
        prob: Share of the batches to mix, in [0, 1].
        start: When mixing begins (int optimizer steps, float fraction of training).
        stop: When mixing ends, in the form of ``start``.
        inputs: Key, index or path (such as "batch.0") of the images (B, ..., H, W), or a list of those; None to find
            them in pairs and under usual names.
        target: Key, index or path of the targets, in the same form.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: As with ``Mixup``; also for inputs that are not images, for boxes, keypoints and
            targets of another size, and for a mask in the batch that is not named.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[CutMix(prob=0.5)], accelerator="cpu", logger=False)

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
    def _inputs(self, context: BatchContext, size: int) -> list[tuple[Path, Tensor]]:
        inputs = super()._inputs(context, size)
        require_images(context.batch, [path for path, _ in inputs], type(self).__name__)
        return inputs

    @override
    def _require_parts(self, context: BatchContext, size: int) -> None:
        """Raise for parts of the batch that belong to places in the image, but cannot or would not be pasted."""
        images = [path for path, _ in self._inputs(context, size)]
        remedy = "use Mixup, or remove CutMix"
        masks_of(context.batch, images, self._paths(context, "target"), type(self).__name__, remedy)

    @override
    def _labels(self, context: BatchContext) -> list[Path]:
        sides = get(context.batch, self._paths(context, "inputs")[0]).shape[-2:]
        targets = self._paths(context, "target")
        return [path for path in targets if rows_and_columns(get(context.batch, path), sides) is None]

    @override
    def _mix(self, context: BatchContext, lam: float, size: int) -> Drawn:
        batch, inputs = context.batch, self._paths(context, "inputs")
        masks = set(self._paths(context, "target")).difference(self._labels(context))
        first = get(batch, inputs[0])
        index = permutation(context.numbers, first)
        seed = context.numbers.getrandbits(63)
        for path in (*inputs, *masks):
            x = get(batch, path)
            places = rows_and_columns(x, first.shape[-2:])
            assert places is not None
            # The same seed draws the same box in all of them.
            mixed, share = cutmix(plain(x).movedim(places, (-2, -1)), lam, index, torch.Generator().manual_seed(seed))
            batch = put(batch, path, in_form_of(mixed.movedim((-2, -1), places), x, spelled(path), "CutMix"))
        context.batch = batch
        return Drawn(share, index)
