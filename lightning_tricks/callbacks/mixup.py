"""Mixup: convex combinations of samples."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.form import in_class_of
from lightning_tricks.core.batches.mixing import Drawn, MixingCallback, permutation
from lightning_tricks.core.batches.paths import Names, get, put, spelled
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_bool, check_range

__all__ = ["Mixup", "mixup"]


def mixup(x: Tensor, lam: float | Tensor, index: Tensor) -> Tensor:
    """Convex combinations of samples: ``lam * x + (1 - lam) * x[index]``, in a new tensor.

    Args:
        x: Samples (B, ...), floating-point or complex.
        lam: Weight of the sample itself, in [0, 1]; one number, or one per sample (B,).
        index: The indices of the partners (B,).

    Example:
        >>> mixup(torch.tensor([[0.0], [1.0]]), 0.75, torch.tensor([1, 0]))
        tensor([[0.2500],
                [0.7500]])

    References:
        Zhang et al., arXiv 1710.09412.
    """
    if not isinstance(lam, Tensor):
        check_range("lam", lam, 0.0, 1.0)
    else:
        lam = lam.to(x.device, x.dtype).view(-1, *[1] * (x.ndim - 1))
    partners = x.index_select(0, index) if x.is_contiguous() else x[index]  # slower, but keeps the strides
    return partners.lerp_(x, lam)


@final
class Mixup(MixingCallback):
    """Trains on convex combinations of samples: ``x' = lam * x + (1 - lam) * x[index]`` and likewise for the loss.

    ``loss = lam * L(f(x'), y) + (1 - lam) * L(f(x'), y[index])`` with ``lam ~ Beta(alpha, alpha)`` and ``index`` a
    permutation of the batch. The module needs no change: its target still looks like the labels ``y``, and every loss
    that is computed from it is the mixed one. ``lam`` is replaced by ``1 - lam`` below 1/2, so that ``y`` is the label
    of the larger part, also in metrics.

    Other parts of a batch stay what they are. If the loss depends on one that belongs to the samples, this is refused:
    a weight of samples, a mask of losses or a second label is named in ``target``, too, and then goes with its sample,
    as in ``target=["y", "weight"]``. Floating-point features that the network sees are named in ``inputs``; ``inputs``
    names all that is mixed, so that ``inputs="x"`` leaves them as they are. Integers that the network sees
    (categories, lengths, attention masks) cannot be mixed, and stay those of the sample itself. If they are the target
    or the lengths of a loss, or choose among the outputs of the network (an index, ``gather``, ``one_hot``) for a loss
    without the target, they are a second label, and are refused as well. Only several integers for each sample that
    outputs are multiplied by look like a mask: name them if they are labels. What is only logged may be anything. A
    matrix over pairs of samples (B, B) is refused where its symmetry shows it; others look like B features, so leave
    them out.

    With ``CutMix`` or ``HiddenMixup`` beside it, one of them is chosen for every batch, by their ``prob``. Validation,
    test and the tensors of the data set are not changed. Random numbers depend on the seed, the number of the batch and
    the rank. No global generators are used, and a resumed run continues exactly.

    Args:
        alpha: Parameter of the Beta distribution, at least 0; 0.1 to 0.4 is common, 1 is strong, 0 mixes nothing.
        prob: Share of the batches to mix, in [0, 1].
        per_sample: Whether to draw ``lam`` for every sample, and not only for every batch.
        start: When mixing begins (int optimizer steps, float fraction of training).
        stop: When mixing ends, in the form of ``start``; 0.9 leaves the last tenth of training unmixed.
        inputs: Key, index or path (such as "batch.0") of the inputs, or a list of those; None to find them in pairs
            and under usual names.
        target: Key, index or path of the targets, in the same form.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start for a ``training_step(dataloader_iter)``; at the first batch if inputs
            or targets are not found, or if no loss was computed from the target; before an optimizer step if the loss
            depends on a part that is not mixed.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[Mixup(alpha=0.2, stop=0.9)], accelerator="cpu", logger=False)

    References:
        Zhang et al., arXiv 1710.09412.
    """

    def __init__(
        self,
        alpha: float = 0.2,
        *,
        prob: float = 1.0,
        per_sample: bool = False,
        start: int | float = 0,
        stop: int | float = 1.0,
        inputs: Names = None,
        target: Names = None,
    ) -> None:
        check_bool("per_sample", per_sample)
        self.alpha, self.prob, self.per_sample = alpha, prob, per_sample
        self.start, self.stop, self.inputs, self.target = start, stop, inputs, target
        super().__init__()

    @override
    def _mix(self, context: BatchContext, lam: float, size: int) -> Drawn:
        weights: float | Tensor = max(lam, 1 - lam)
        inputs = [(path, get(context.batch, path)) for path in self._paths(context, "inputs")]
        index = permutation(context.numbers, inputs[0][1])
        if self.per_sample:
            others = [context.numbers.betavariate(self.alpha, self.alpha) for _ in range(size - 1)]
            weights = torch.tensor([max(weight, 1 - weight) for weight in (lam, *others)])
            weights = weights.to(index.device, non_blocking=True)
        for path, x in inputs:
            mixed = in_class_of(mixup(x, weights, index), x, spelled(path), "Mixup")
            context.batch = put(context.batch, path, mixed)
        return Drawn(weights, index)
