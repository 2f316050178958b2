"""Cross-entropy for classes of unequal frequency: logits are raised by the logarithm of each class's share."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_tricks.core.checks import check_range, check_type

__all__ = ["logit_adjustment"]

SMALLEST = 1e-12  # the share of a class without samples, as in the authors' code


def logit_adjustment(logits: Tensor, targets: Tensor, prior: Tensor, *, tau: float = 1.0) -> Tensor:
    """Logit-adjusted cross-entropy: ``F.cross_entropy(logits + tau * log(prior), targets)``.

    A rare class must win by a larger margin in training, so that plain logits are balanced in prediction: ``argmax``
    over them minimizes the mean of the classes' errors. Prediction and validation take the logits as they are.

    Args:
        logits: The logits (N, C, ...).
        targets: The labels (N, ...), or the probabilities of the classes (N, C, ...).
        prior: The share of each class among the training labels (C,); counts give the same loss.
        tau: How much of the imbalance is taken out, at least 0; 0 is the plain loss.

    Returns:
        The mean over the labels.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or a prior of another number of classes.

    Example:
        >>> import torch
        >>> logits, targets = torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 1])
        >>> logit_adjustment(logits, targets, torch.tensor([0.9, 0.1]))
        tensor(1.2040)

    References:
        Menon et al., Long-tail Learning via Logit Adjustment, ICLR 2021, arXiv 2007.07314.
    """
    check_range("tau", tau, 0.0)
    check_type("prior", prior, Tensor)
    if logits.ndim < 2 or prior.shape != logits.shape[1:2]:
        raise ValueError(
            f"prior must have a share (C,) for each class of the logits (N, C, ...), got {tuple(prior.shape)} for"
            f" {tuple(logits.shape)}."
        )
    return F.cross_entropy(adjusted_logits(logits, prior, tau, 1), targets)


def adjusted_logits(logits: Tensor, prior: Tensor, tau: float, dim: int) -> Tensor:
    """``logits + tau * log(prior)``, where the classes are the dimension ``dim`` of the logits."""
    shares = (prior / prior.sum()).clamp(min=SMALLEST).log().to(logits)
    return logits + tau * shares.view(-1, *[1] * (logits.ndim - 1 - dim))
