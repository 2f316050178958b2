"""How much every entry of a tensor of losses counts in the sum over them: masks leave some out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_tricks.core.mixed_targets.losses import arguments, entry_weights_of, is_loss
from lightning_tricks.core.mixed_targets.operations import Function, moves, weighs

Call = tuple[tuple[Any, ...], dict[str, Any]]


def entry_weights(
    func: Function, call: Call, of_weights: Call, known: Sequence[Tensor | None], result: Tensor
) -> Tensor | None:
    """How much every entry of a result counts in the sum over them; None if all count as 1.

    A loss of torch ignores or weighs some entries, and a product with a mask leaves some out. What is made of losses in
    any other way, such as the sum over classes, is a loss again, which counts if one of them does.

    Args:
        func: The function that was called.
        call: Its arguments.
        of_weights: Its arguments, of losses their weights.
        known: The weights of the losses among the arguments.
        result: The result.
    """
    if is_loss(func):
        weights = entry_weights_of(func, arguments(func, *call))
        return None if weights is None else weights.to(result.dtype)
    args, kwargs = of_weights
    if weighs(func):
        return func(*args, **kwargs)
    given = [weights for weights in known if weights is not None]
    if not given or moves(func):
        return func(*args, **kwargs) if given else None
    weights = given[0] if given[0].shape == result.shape else func(*args, **kwargs)
    return (weights != 0).to(result.dtype)
