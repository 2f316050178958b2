"""The losses by which samples are compared before training on them: those that they would have alone.

A mean over the positions of a batch is for one sample the mean over its own positions, however much it is padded; a sum
is its sum. Which of them a sum is shows only when it is divided, by the number of positions that count or by another
number. So a sum of losses is a tensor that sees by what it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.operations import divides, is_elementwise


class SampleScores:
    """By what the samples are compared, for one sum or mean of their losses.

    Args:
        losses: The losses (N, ...).
        weights: How much they count in the sum, in their shape; None if all count as 1.
        sample_ids: The samples of the first dimension (N,).
        samples: The number of samples, B.
        divisor: The number by which the sum has been divided; 1 for a sum, None for a mean over all that count.
    """

    def __init__(
        self, losses: Tensor, weights: Tensor | None, sample_ids: Tensor, samples: int, divisor: float | None
    ) -> None:
        losses = losses.detach().reshape(len(losses), -1)
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        weights = (
            torch.ones_like(losses) if weights is None else weights.detach().reshape(losses.shape).to(losses.dtype)
        )
        total, count = (
            losses.new_zeros(samples).index_add(0, sample_ids, part.sum(1))
            for part in (losses, (weights != 0).to(losses.dtype))
        )
        weight = weights.sum()
        self.values = torch.where(count > 0, total / count * (count.sum() / weight), -torch.inf)
        """The loss of every sample alone (B,); -inf for a sample without a loss that counts."""
        if divisor is not None:
            self._mean, self._sum = self.values.clone(), torch.where(count > 0, total, -torch.inf)
            self._is_mean, self._weight, self._samples = torch.zeros_like(weight, dtype=torch.bool), weight, samples
            self._divisor: float | Tensor = 1.0
            self._rounding = 1e-3  # a number of positions may have an epsilon added to it
            self.divide(divisor)

    def divide(self, number: float | Tensor) -> None:
        """Note that the sum is divided; it is a mean as soon as it were 1 if each loss were 1."""
        number = number.detach() if isinstance(number, Tensor) else number
        if isinstance(number, Tensor) and number.is_floating_point():
            self._rounding = max(self._rounding, torch.finfo(number.dtype).eps)
        self._divisor = self._divisor * number
        self._is_mean |= (self._divisor - self._weight).abs() <= self._rounding * self._weight.abs()
        # Another number is taken to grow with the samples; for one alone it is a part of it.
        alone = self._sum if isinstance(number, int) and number == 1 else self._sum * (self._samples / self._divisor)
        self.values.copy_(torch.where(self._is_mean, self._mean, alone))


class SummedLosses(torch.Tensor):
    """A sum of losses that sees by what it, or what is made of it by numbers and other sums, is divided."""

    scores: tuple[SampleScores, ...]

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the plain value."""
        if divides(func) and isinstance(args[0], SummedLosses):
            for scores in args[0].scores:
                scores.divide(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        sums = [value.scores for value in args if isinstance(value, SummedLosses)]
        if is_elementwise(func) and type(result) is Tensor and not result.ndim:
            return summed_losses(result, *sums)
        return result


def summed_losses(value: Tensor, *scores: Sequence[SampleScores]) -> Tensor:
    """The value of a sum, which notes its divisions in the scores."""
    value.__class__ = SummedLosses  # as_subclass would add a node to the graph
    value.scores = tuple(each for several in scores for each in several)  # type: ignore[attr-defined]
    return value
