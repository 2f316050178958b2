"""Transforms of samples on the device: torchvision's, or any callable."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.callback import BatchCallback
from lightning_tricks.core.batches.cutting import has_one_entry_a_sample
from lightning_tricks.core.batches.form import in_form_of
from lightning_tricks.core.batches.images import masks_of, require_images, rows_and_columns
from lightning_tricks.core.batches.paths import Names, Path, described, get, parts, put, spelled, walk
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.random_numbers import random_numbers_from

__all__ = ["BatchTransform"]

_OF_COLOURS = (  # torchvision's transforms for which a floating-point image has values in [0, 1]
    *("AugMix", "AutoAugment", "ColorJitter", "RandAugment", "RandomAdjustSharpness", "RandomAutocontrast"),
    *("RandomEqualize", "RandomInvert", "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize"),
    "TrivialAugmentWide",
)


@final
class BatchTransform(BatchCallback):
    """Trains on transformed samples: ``x'[i] = transform(x[i])``, on the device, each with its own random numbers.

    ``transform`` is a transform of ``torchvision.transforms.v2`` (``RandAugment``, ``TrivialAugmentWide``, ``AugMix``,
    a ``Compose`` of several), ``CutOut``, ``ColOut``, or any callable that takes a sample without the batch dimension.
    Transforms of torchvision also get the targets that must follow: masks with the height and width of the images, and
    the entries of a list with one entry per sample that holds ``tv_tensors``, such as dicts with ``BoundingBoxes``.
    Boxes and masks that cannot follow are refused by their path, and so are normalized images for a transform that
    takes values in [0, 1]: put ``Normalize`` after it, in a ``Compose``.

    Validation, test and the tensors of the data set are not changed. Random numbers depend on the seed, the number of
    the batch and the rank, whether they come from torch, Python or NumPy; the global generators are left as they were,
    and a resumed run continues exactly. Samples are transformed before those of ``Mixup`` are mixed, and one after the
    other, by some small operations for each; ``CutOut``, ``ColOut`` and any transform with a method ``of_batch(x)``
    transform all of them at once.

    Args:
        transform: A callable that takes and returns a sample.
        start: When it begins (int optimizer steps, float fraction of training).
        stop: When it ends, in the form of ``start``.
        inputs: Key, index or path (such as "batch.0") of the inputs (B, ...), or a list of those; None to find them in
            pairs and under usual names.
        target: Key, index or path of the targets, in the same form.

    Raises:
        TypeError: For a transform that cannot be called, or a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At the first batch, if there are no inputs, or for a part that would have to follow
            and cannot; at a batch whose samples get several shapes, or on which the transform raises a TypeError or
            ValueError, also one of a mistake in its own code, which is shown as the cause.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[BatchTransform(torch.nn.Dropout(0.1))], accelerator="cpu", logger=False)

    References:
        Cubuk et al., RandAugment, arXiv 1909.13719; Müller and Hutter, TrivialAugment, arXiv 2103.10158; Hendrycks et
        al., AugMix, arXiv 1912.02781.
    """

    order = -1  # before samples are compared by their losses

    def __init__(
        self,
        transform: Callable[..., Any],
        *,
        start: int | float = 0,
        stop: int | float = 1.0,
        inputs: Names = None,
        target: Names = None,
    ) -> None:
        if not callable(transform) or isinstance(transform, type):
            raise TypeError(f"transform must be a callable that takes a sample, got {transform!r}.")
        self.transform = transform
        self.start, self.stop, self.inputs, self.target = start, stop, inputs, target
        super().__init__()
        self._key = re.sub(r" at 0x[0-9a-fA-F]+", "", self._key)  # addresses differ between runs and ranks

    @override
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        inputs, followers = self._found_parts(context.batch)
        try:
            self._transform(context, inputs, followers)
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"{self.written()}: {str(error).rstrip('.')}. The batch is {described(context.batch)}: name in inputs="
                " what can be transformed, or use another transform."
            ) from error

    def _transform(self, context: BatchContext, inputs: list[Path], followers: list[Path]) -> None:
        """Transform the samples of a batch, each with random numbers of its own."""
        seed, device = context.numbers.getrandbits(32), get(context.batch, inputs[0]).device
        if self._is_torchvisions:
            with random_numbers_from(seed, device):
                context.batch = self._together(context.batch, inputs, followers)
            return
        for path in inputs:
            with random_numbers_from(seed, device):  # the same for all inputs of a sample
                new = self._transformed(path, get(context.batch, path))
            context.batch = self._with(context.batch, path, new)

    def _transformed(self, path: Path, x: Tensor) -> Tensor:
        """The transformed samples of an input."""
        if hasattr(self.transform, "of_batch"):
            return self.transform.of_batch(x)
        return self._stacked(path, [self.transform(sample) for sample in x.unbind()])

    @override
    def _check(self, trainer: L.Trainer, context: BatchContext) -> None:
        self._found_parts(context.batch)

    @property
    def _is_torchvisions(self) -> bool:
        v2 = sys.modules.get("torchvision.transforms.v2")  # loaded, if there is such a transform
        return v2 is not None and isinstance(self.transform, v2.Transform)

    def _found_parts(self, batch: Any) -> tuple[list[Path], list[Path]]:
        """The paths of the inputs, and those of masks and lists that are transformed with them."""
        inputs = self.inputs_in(batch)
        tensors = [get(batch, path) for path in inputs]
        if any(each.is_nested or each.layout != torch.strided or not each.ndim for each in tensors):
            raise MisconfigurationException(f"BatchTransform needs dense inputs (B, ...), got {described(batch)}.")
        targets = self.targets_if_any(batch)
        self._require_range(batch, inputs)
        if not self._is_torchvisions:
            if all(get(batch, path).ndim > 2 for path in inputs):
                remedy = "use a transform of torchvision.transforms.v2, or transform samples in the data set"
                if masks := masks_of(batch, inputs, targets, "BatchTransform", remedy):
                    raise MisconfigurationException(
                        f"BatchTransform cannot know whether {spelled(masks[0])}, a mask, must follow"
                        f" {self.transform!r}: {remedy}."
                    )
            return inputs, []
        if any(get(batch, path).ndim < 4 for path in inputs):
            raise MisconfigurationException(
                f"torchvision's transforms take images (B, C, H, W), got {described(batch)}: name them in inputs=."
            )
        lists = list(_lists(batch, len(get(batch, inputs[0]))))
        rest = batch
        for path in lists:
            rest = put(rest, path, None)
        remedy = "put tv_tensors in a list with one entry per sample, or remove it from the batch"
        return inputs, [*masks_of(rest, inputs, targets, "BatchTransform", remedy), *lists]

    def _together(self, batch: Any, inputs: list[Path], followers: list[Path]) -> Any:
        """The batch with the samples that torchvision made of its images, masks and lists."""
        from torchvision.tv_tensors import Image, Mask

        sides, columns, places = require_images(batch, inputs, "BatchTransform"), [], {}
        for path in (*inputs, *followers):
            part = get(batch, path)
            if isinstance(part, Tensor):
                places[path] = rows_and_columns(part, sides) or (-2, -1)
                kind = Image if path in inputs else Mask
                part = [kind(sample) for sample in part.movedim(places[path], (-2, -1)).unbind()]
            columns.append(part)
        made = [self.transform(*sample) for sample in zip(*columns, strict=True)]
        columns = [made] if len(columns) == 1 else list(zip(*made, strict=True))
        for path, new in zip((*inputs, *followers), columns, strict=True):
            if path in places:
                batch = self._with(batch, path, self._stacked(path, new).movedim((-2, -1), places[path]))
            else:
                batch = put(batch, path, type(get(batch, path))(new))
        return batch

    def _with(self, batch: Any, path: Path, new: Tensor) -> Any:
        """The batch with other values of a part."""
        return put(batch, path, in_form_of(new, get(batch, path), spelled(path), "BatchTransform"))

    def _stacked(self, path: Path, samples: list[Any]) -> Tensor:
        if not isinstance(samples[0], Tensor):
            raise MisconfigurationException(
                f"BatchTransform needs a tensor of each sample of {spelled(path)}, got a {type(samples[0]).__name__}:"
                f" end {self.transform!r} with a conversion to tensors."
            )
        if len({(sample.shape, sample.dtype) for sample in samples}) > 1:
            raise MisconfigurationException(
                f"BatchTransform makes samples of several shapes of {spelled(path)}, such as"
                f" {tuple(samples[0].shape)}, which are no batch: end {self.transform!r} with a resize to one size."
            )
        return torch.stack([sample.as_subclass(Tensor) for sample in samples])

    def _require_range(self, batch: Any, inputs: list[Path]) -> None:
        """Raise for values outside of [0, 1], if a transform of colours would take them for something else."""
        if not (colours := [name for name in _names(self.transform) if name in _OF_COLOURS]):
            return
        for path in inputs:
            if (x := get(batch, path)).is_floating_point():
                least, most = (value.item() for value in x.aminmax())
                if least < -0.01 or most > 1.01:
                    raise MisconfigurationException(
                        f"{colours[0]} takes images with values in [0, 1] or in uint8, got {spelled(path)} with values"
                        f" from {least:.3g} to {most:.3g}: normalize after it, BatchTransform(v2.Compose([...,"
                        " v2.Normalize(...)])), and also the images of the validation."
                    )


def _names(transform: Any) -> Iterator[str]:
    """The names of the classes of a transform and of those that it begins with, as far as they are torchvision's."""
    if type(transform).__module__.startswith("torchvision."):
        yield type(transform).__name__
    inner = getattr(transform, "transforms", transform if isinstance(transform, torch.nn.Sequential) else ())
    for other in inner if isinstance(inner, list | tuple | torch.nn.ModuleList | torch.nn.Sequential) else ():
        if type(other).__name__ == "Normalize":
            return
        yield from _names(other)


def _lists(batch: Any, samples: int, path: Path = ()) -> Iterator[Path]:
    """The paths of lists with one entry per sample that hold ``tv_tensors``."""
    from torchvision.tv_tensors import TVTensor

    for name, value in parts(batch):
        if has_one_entry_a_sample(value, samples):
            if any(isinstance(leaf, TVTensor) for _, leaf in walk(value)):
                yield (*path, name)
        else:
            yield from _lists(value, samples, (*path, name))
