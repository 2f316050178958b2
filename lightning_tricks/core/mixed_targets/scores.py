"""The losses by which samples are compared before training on them: those that they would have alone.

A mean over the positions of a batch is for one sample the mean over its own positions, however much it is padded; a sum
is its sum. Which of them a sum is shows only when it is divided, by the number of positions that count or by another
number. So a sum of losses is a tensor that sees by what it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.divisors import WEIGHED, counted
from lightning_tricks.core.mixed_targets.operations import Function, divides, is_elementwise, moves, weighs

Call = tuple[tuple[Any, ...], dict[str, Any]]  # the positional and the keyword arguments of a function


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
        weights = torch.ones_like(losses) if weights is None else weights.detach().reshape(losses.shape)
        total, count = (
            losses.new_zeros(samples).index_add(0, sample_ids, part.to(losses.dtype).sum(1))
            for part in (losses, weights != 0)
        )
        weight = weights.to(losses.dtype).sum()
        self.values = torch.where(count > 0, total / count * (count.sum() / weight), -torch.inf)
        """The loss of every sample alone (B,); -inf for a sample without a loss that counts."""
        if divisor is not None:
            self._mean, self._sum = self.values.clone(), torch.where(count > 0, total, -torch.inf)
            self._is_mean, self._weight, self._samples = torch.zeros_like(weight, dtype=torch.bool), weight, samples
            self.note(divisor)

    def note(self, divisor: float | Tensor) -> None:
        """Note the number by which the sum has been divided; with it a mean would be 1 if each loss were 1."""
        is_sum = not isinstance(divisor, Tensor) and divisor == 1
        is_rounded = isinstance(divisor, Tensor) and divisor.is_floating_point()
        rounding = max(1e-3, torch.finfo(divisor.dtype).eps if is_rounded else 0.0)  # type: ignore[union-attr]
        self._is_mean |= (divisor - self._weight).abs() <= rounding * self._weight.abs()
        # Any other number is taken to grow with the samples: for one alone it is a part of it.
        alone = self._sum if is_sum else self._sum * (self._samples / divisor)
        self.values.copy_(torch.where(self._is_mean, self._mean, alone))


class SummedLosses(torch.Tensor):
    """A sum of losses that sees by what it, or what is made of it by numbers and other sums, is divided."""

    terms: tuple[tuple[SampleScores, float | Tensor], ...]  # the scores of every sum, and by what it has been divided

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the plain value."""
        kwargs = kwargs or {}
        values = [*args, *kwargs.values()]
        terms = [term for value in values if isinstance(value, SummedLosses) for term in value.terms]
        if divides(func) and isinstance(values[0], SummedLosses):
            number = values[1].detach() if isinstance(values[1], Tensor) else values[1]
            terms = [(scores, divisor * number) for scores, divisor in terms]
            for scores, divisor in terms:
                scores.note(divisor)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        follows = is_elementwise(func) and isinstance(result, Tensor) and not result.ndim
        return summed_losses(result, terms) if follows else result


def summed_losses(value: Tensor, terms: Sequence[tuple[SampleScores, float | Tensor]]) -> Tensor:
    """The value of a sum of losses, which notes by what it is divided."""
    value.__class__ = SummedLosses  # as_subclass would add a node to the graph
    value.terms = tuple(terms)  # type: ignore[attr-defined]
    return value


# -- how much every entry of a tensor of losses counts in the sum over them: masks leave some out ---------------------


def weights_in_loss(func: Function, call: Mapping[str, Any]) -> Tensor | None:
    """How much the entries of a loss of torch count in what it divides, or the step does; None if all count as 1.

    A mask is the weight of binary losses, too. Their own mean divides by the number of all entries.

    Args:
        func: The loss.
        call: Its arguments by name.
    """
    if (mask := counted(call)) is not None:
        return mask
    by_entry = func.__name__ in WEIGHED or (func.__name__ in _OF_ENTRIES and call["reduction"] != "mean")
    weight = call.get("weight") if by_entry else None
    return None if weight is None else weight.expand(call["target"].shape)


def weights_in_result(
    func: Function, of_weights: Call, known: Sequence[Tensor | None], result: Tensor
) -> Tensor | None:
    """How much the entries count in what any other function makes of losses; None if all count as 1.

    A product with a mask leaves some out. What is made of losses in any other way, such as the sum over classes, is a
    loss again, which counts if one of them does.

    Args:
        func: The function that was called.
        of_weights: Its arguments, of losses their weights.
        known: The weights of the losses among the arguments.
        result: The result.
    """
    args, kwargs = of_weights
    if weighs(func):
        return func(*args, **kwargs)
    given = [weights for weights in known if weights is not None]
    if not given or moves(func):
        return func(*args, **kwargs) if given else None
    weights = given[0] if given[0].shape == result.shape else func(*args, **kwargs)
    return (weights != 0).to(result.dtype)


_OF_ENTRIES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")  # over the number of entries
