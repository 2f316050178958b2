"""Targets of a binary cross-entropy over classes, of labels that may be mixed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_tricks.core.checks import check_count, check_range, check_type
from lightning_tricks.core.mixed_targets.target import MixedTarget

__all__ = ["bce_targets"]


def bce_targets(labels: Tensor, classes: int, *, smoothing: float = 0.0, threshold: float | None = None) -> Tensor:
    """Targets for binary cross-entropy: ``t = (1 - smoothing) * one_hot(y) + smoothing / classes``, as timm has them.

    With ``threshold`` they are ``t > threshold``, 0 or 1. While ``Mixup``, ``CutMix`` or ``HiddenMixup`` mixes,
    ``t = lam * t(y) + (1 - lam) * t(y[index])``: with a threshold below 1/2 an image has the classes of both parts, but
    one whose share is no larger. Without a threshold it is that of any mixed loss, as this one is linear in ``t``.

    Args:
        labels: The classes (B,), also those of a batch that is mixed.
        classes: The number of classes C, at least 2.
        smoothing: The label smoothing, in [0, 1).
        threshold: The value above which a target is 1, in [0, 1); None for targets as they are; timm's recipes
            have 0.2.

    Returns:
        The targets (B, C), for ``F.binary_cross_entropy_with_logits(logits, targets)``.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or labels that are no classes (B,).

    Example:
        >>> import torch
        >>> bce_targets(torch.tensor([0, 2]), 3, smoothing=0.3)
        tensor([[0.8000, 0.1000, 0.1000],
                [0.1000, 0.1000, 0.8000]])

    References:
        Wightman et al., ResNet strikes back, arXiv 2110.00476.
    """
    check_count("classes", classes, least=2)
    check_range("smoothing", smoothing, 0.0, 1.0, below=True)
    if threshold is not None:
        check_range("threshold", threshold, 0.0, 1.0, below=True)
    check_type("labels", labels, Tensor)
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be classes (B,), integers, got {labels.dtype} {tuple(labels.shape)}.")
    try:
        one_hot = F.one_hot(labels.long(), classes)
    except RuntimeError as error:  # from a CPU; on a GPU it would come later, from elsewhere
        raise ValueError(f"labels must be in [0, classes), got classes={classes}: {error}") from error
    hot = one_hot.to(torch.get_default_dtype()) * (1 - smoothing) + smoothing / classes
    if threshold is None:
        return hot
    if not isinstance(hot, MixedTarget) or not hot.plan.open or len(hot.branches) == 1:
        return (hot > threshold).to(hot.dtype)
    lam = hot.plan.lam
    if isinstance(lam, Tensor):
        if hot.sample_ids is None:
            raise hot.plan.refusal("bce_targets(threshold=...) of labels whose samples are not known.")
        lam = lam[hot.sample_ids, None].to(hot.branches[0])
    one, other = hot.branches
    return 0 * hot + (torch.lerp(other, one, lam) > threshold).to(one)  # the same in both branches
