"""By what the means of a training step are divided: the number of their targets, as their code has it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.operations import compares_entries, is_linear, weighs

Loss = Callable[..., Tensor]
Count = Callable[[Any], int | float | Tensor]  # of a batch: how many targets its loss is the mean of
WEIGHED = ("mse_loss", "l1_loss")  # whose means are over the sum of the weights of their entries


def counted(call: Mapping[str, Any]) -> Tensor | None:
    """A mask of the entries that are not ignored; None for a loss that ignores none."""
    if "ignore_index" not in call or call["target"].is_floating_point():
        return None
    return call["target"] != call["ignore_index"]


def divisor(func: Loss, call: Mapping[str, Any], entries: int) -> float | Tensor:
    """The number that a mean of torch divides the sum of its entries by.

    Args:
        func: The loss.
        call: Its arguments by name.
        entries: The number of losses that it makes with ``reduction="none"``.
    """
    mask, weight = counted(call), call.get("weight")
    if call["reduction"] == "batchmean":
        return len(next(iter(call.values())))
    if mask is not None:
        return mask.sum() if weight is None else (weight[call["target"].where(mask, 0)] * mask).sum()
    if weight is not None and func.__name__ in WEIGHED:
        return weight.sum()
    return entries


class Divisors:
    """The numbers that the losses of a training step are divided by, each once.

    Args:
        ignore_index: The label that does not count where a sum is divided by a number of Python's.
        of_parts: Whether the loss of a batch must be the mean of those of its parts, so that it is a sum of means with
            constant factors, and no loss of a sample depends on the others.
    """

    def __init__(self, ignore_index: int, *, of_parts: bool = False) -> None:
        self.ignore_index, self.of_parts = ignore_index, of_parts
        self.found: dict[Hashable, float | Tensor] = {}
        self._labels: float | Tensor = 0.0  # those of the last losses that were summed

    def note_loss(self, func: Loss, call: Mapping[str, Any]) -> str:
        """Note the divisor of a loss of torch; why it does not say one, or an empty string."""
        first, target = next(iter(call.values())), call.get("target")
        traced = any(isinstance(value, Tensor) and value.requires_grad for value in call.values())
        if not traced or not torch.is_grad_enabled():  # it is only logged
            return ""
        if call["reduction"] in ("none", "sum"):
            labels = target if isinstance(target, Tensor) and not target.is_floating_point() else None
            self._labels = first.numel() if labels is None else (labels != self.ignore_index).sum()
            return SUMMED if call["reduction"] == "sum" else ""
        entries = _entries(func, call)
        if entries is None:
            return f"{func.__name__}() does not say by how many targets it is divided."
        of = id(target), id(call.get("weight")), call.get("ignore_index")  # alive until the backward pass
        self.found[of] = divisor(func, call, entries)
        return ""

    def note_reduction(self, func: Loss, losses: Tensor, result: Tensor) -> str:
        """Note the number of losses of which a mean is taken by hand; why there is none, or an empty string."""
        if result.ndim or not result.requires_grad:
            return ""
        if func.__name__ == "mean":
            self.found[losses.numel()] = losses.numel()
            return ""
        return SUMMED if func.__name__ == "sum" else f"{func.__name__}() of losses is no mean."

    def compared(self, func: Loss) -> str:
        """Why a function of the losses of entries makes them depend on one another; an empty string if not."""
        if not (self.of_parts and compares_entries(func)):
            return ""
        return f"{func.__name__}() compares the losses of a batch with one another, and a part has only some of them."

    def unlike_parts(self, func: Loss, targets: int) -> str:
        """Why a function of a mean is not the mean of the same function of the parts; an empty string if it is.

        Args:
            func: The function, of a mean and perhaps more.
            targets: How many of its arguments come from the targets of the batch.
        """
        if not self.of_parts or (is_linear(func) and not (weighs(func) and targets > 1)):
            return ""
        return f"{func.__name__}() of a mean over the batch is not the mean of that over its parts."

    def note_division(self, number: Any) -> str:
        """Note the number that a sum of losses is divided by; why it is none of targets, or an empty string.

        A sum without any label is often divided by 1 in place of 0, and has no targets.
        """
        if isinstance(number, Tensor) and number.numel() == 1 and not number.requires_grad:
            self.found[id(number)] = number.detach() * (self._labels != 0)
            return ""
        if isinstance(number, int | float) and (labels := float(self._labels)) in (0, number):  # a GPU waits
            self.found[labels] = labels
            return ""
        return f"a sum of losses is divided by {number!r}, which is not the number of the labels."


def as_count(number: Any, device: torch.device) -> Tensor:
    """A number of targets as a tensor on the device.

    Raises:
        TypeError: For anything but one number.
        ValueError: For a number below 0.
    """
    if isinstance(number, Tensor) and number.numel() == 1:
        with torch._C.DisableTorchFunctionSubclass():
            return number.detach().reshape(()).to(device, torch.float32)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(
            f"count must return the number of targets in a batch, a number or a tensor of one, got {number!r}."
        )
    if not float(number) >= 0:
        raise ValueError(f"count must return a number of targets of at least 0, got {number!r}.")
    return torch.full((), float(number), device=device)


def pass_count(trick: str) -> str:
    """What to do if the targets of a loss cannot be counted."""
    return (
        f"Pass {trick} a function count= of the batch that says how many targets its loss is the mean of, such as"
        " count=lambda batch: (batch['labels'][:, 1:] != -100).sum()."
    )


SUMMED = "a sum of losses does not say by how many targets it is divided."
_OF_CLASSES = ("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss")  # of the rows (N, C)
_BY_ENTRY = {
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "hinge_embedding_loss"),
    *("huber_loss", "kl_div", "l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss"),
}


def _entries(func: Loss, call: Mapping[str, Any]) -> int | None:
    """The number of losses that a loss of torch makes with ``reduction="none"``; None for one that is not known."""
    first, *others = [value for value in call.values() if isinstance(value, Tensor)]
    if func.__name__ in ("cross_entropy", "nll_loss"):
        return first.numel() // first.shape[min(first.ndim - 1, 1)]
    if func.__name__ in _OF_CLASSES:
        return len(first) if first.ndim > 1 else 1
    return torch.broadcast_shapes(first.shape, others[0].shape).numel() if func.__name__ in _BY_ENTRY else None
