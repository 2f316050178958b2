"""Targets that know: to everybody the plain labels, in a loss what a trick makes of them.

Every operation on such a target is done for each of its branches: the labels, and those that they are mixed with. Where
the result is a single number that depends on the weights, the branches become one, ``lam * a + (1 - lam) * b``; so a
loss may be made of anything, and is mixed as a whole if it is linear from there on. A single number that does not
depend on the weights (a metric, a count) is that of the labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_tricks.core.functions import moves, reduces_samples, reorders, uses_form_only, writes
from lightning_tricks.core.losses import Choose, Weight, arguments, is_loss, loss_by_samples, values_by_samples


class Plan:
    """What becomes of the losses of one batch; shared by its targets and all that is computed from them.

    Args:
        lam: Weight of the first branch, in [0, 1]; one number, or one for each sample of shape (B,).
        choose: Takes the loss of each sample, of shape (B,), and gives those that count; None for all.
    """

    def __init__(self, lam: Weight = 1.0, choose: Choose | None = None) -> None:
        self.lam = lam
        self.choose = choose
        self.mix_predictions: tuple[float, Tensor] | None = None  # weight and partners, to mix what a loss compares
        self.losses = 0  # how many were computed by it
        self.open = True  # while its batch is in work; afterwards its targets are plain labels

    @property
    def by_samples(self) -> bool:
        """Whether samples count differently."""
        return isinstance(self.lam, Tensor) or self.choose is not None

    def weights(self, branches: int) -> list[Weight]:
        """The weight of each branch."""
        return [self.lam, 1 - self.lam][:branches]


class KnowingTarget(torch.Tensor):
    """Looks like the first of its branches."""

    plan: Plan
    branches: tuple[Tensor, ...]
    owners: Tensor | None  # the sample that each entry along the first dimension belongs to, where samples matter
    number: int  # number of samples
    is_loss: bool  # whether it depends on the weights

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Evaluate a function of targets for each branch."""
        return _evaluated(func, tuple(args), kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.branches[0].__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.branches[0], memo)


def knowing(branches: Sequence[Tensor], plan: Plan) -> KnowingTarget:
    """A target of one or two branches of the same shape, the samples first."""
    first = branches[0]
    owners = torch.arange(len(first), device=first.device) if plan.by_samples else None
    return _know(first.as_subclass(KnowingTarget), branches, plan, owners, len(first), False)


def _know(
    target: KnowingTarget, branches: Sequence[Tensor], plan: Plan, owners: Tensor | None, number: int, is_loss: bool
) -> KnowingTarget:
    target.branches, target.plan, target.owners, target.number = tuple(branches), plan, owners, number
    target.is_loss = is_loss
    return target


@torch.compiler.disable
def _evaluated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = [each for each in _known_in((args, kwargs)) if each.plan.open]
    if not known or uses_form_only(func, args):
        return func(*_branch(args, 0), **_branch(kwargs, 0))
    if kwargs.get("out") is not None:
        raise TypeError(f"{func.__name__}(out=...) of a target with two labels: leave out= out.")
    plan, branches = known[0].plan, len(known[0].branches)
    calls = [(_branch(args, number), _branch(kwargs, number)) for number in range(branches)]
    if writes(func):
        return _written(func, args, calls, known)
    if plan.mix_predictions is not None and is_loss(func):
        calls = [((), _mixed(arguments(func, *call), *plan.mix_predictions)) for call in calls]
    if plan.by_samples and (reduced := _by_samples(func, calls, known)) is not None:
        return reduced
    first = func(*calls[0][0], **calls[0][1])
    if not any(True for _ in _tensors_in(first)):
        return first
    results = [first, *(func(*each, **named) for each, named in calls[1:])]
    return _together(results, func, args, kwargs, known)


def _together(
    results: Sequence[Any], func: Callable[..., Any], args: Any, kwargs: Any, known: list[KnowingTarget]
) -> Any:
    """The results of all branches as one."""
    first = results[0]
    if isinstance(first, tuple | list):
        return type(first)([_together(each, func, args, kwargs, known) for each in zip(*results, strict=True)])
    if not isinstance(first, Tensor):
        return first
    plan = known[0].plan
    of_weights = is_loss(func) or any(each.is_loss for each in known)
    if first.requires_grad and not of_weights:
        if plan.mix_predictions is not None:
            raise RuntimeError(
                f"Predictions are mixed in a loss of torch.nn.functional, got {func.__name__}() of a target: use one."
            )
        of_weights = True
    if first.ndim:
        owners = _owners(func, args, kwargs, first, known) if plan.by_samples else None
        return _know(first.as_subclass(KnowingTarget), results, plan, owners, known[0].number, of_weights)
    if not of_weights:
        return first
    if plan.by_samples:
        raise _unknown_samples(func)
    plan.losses += first.requires_grad
    return plan.lam * first + (1 - plan.lam) * results[1]


def _mixed(call: dict[str, Any], lam: float, partners: Tensor) -> dict[str, Any]:
    """A loss's arguments with the predictions of each sample mixed with its partner's."""
    name, predictions = next(iter(call.items()))
    if len(predictions) != len(partners):
        raise RuntimeError(
            f"Predictions are mixed sample by sample, got {tuple(predictions.shape)} for {len(partners)} samples."
        )
    return {**call, name: torch.lerp(predictions[partners], predictions, lam)}


# -- where samples count differently ----------------------------------------------------------------------------------


def _by_samples(func: Callable[..., Any], calls: Sequence[Any], known: list[KnowingTarget]) -> Tensor | None:
    """A reduction over the samples, by a loss or by hand; None for any other function."""
    plan, owner = known[0].plan, next((each for each in known if each.owners is not None), None)
    weights = plan.weights(len(calls))
    if is_loss(func):
        named = [arguments(func, args, kwargs) for args, kwargs in calls]
        if named[0]["reduction"] == "none":
            return None
        if owner is None or owner.owners is None or len(owner.owners) != len(next(iter(named[0].values()))):
            raise _unknown_samples(func)
        loss = loss_by_samples(func, named, weights, owner.owners, owner.number, plan.choose)
    elif reduces_samples(func, *calls[0]) and known[0].is_loss:
        if owner is None or owner.owners is None:
            raise _unknown_samples(func)
        values, factor = values_by_samples(
            [args[0] for args, _ in calls], weights, owner.owners, owner.number, plan.choose
        )
        loss = func(values, *calls[0][0][1:], **calls[0][1]) * factor
    else:
        return None
    plan.losses += 1
    return loss


def _owners(
    func: Callable[..., Any], args: Any, kwargs: Any, result: Tensor, known: list[KnowingTarget]
) -> Tensor | None:
    """The sample of each entry of a result; None if that is not clear."""
    source = args[0] if args else None
    if moves(func) and isinstance(source, KnowingTarget):
        if source.owners is None:
            return None
        marks = source.owners.view(-1, *[1] * (source.branches[0].ndim - 1)).expand(source.branches[0].shape)
        moved = func(marks, *_branch(args[1:], 0), **_branch(kwargs, 0))
        if not isinstance(moved, Tensor) or moved.shape != result.shape or not moved.numel():
            return None
        moved = moved.reshape(len(moved), -1)
        return moved[:, 0] if (moved == moved[:, :1]).all() else None
    if reorders(func):
        return None
    return next((each.owners for each in known if each.owners is not None and len(each.owners) == len(result)), None)


def _unknown_samples(func: Callable[..., Any]) -> RuntimeError:
    return RuntimeError(
        f"{func.__name__} of a target whose samples count differently: it is not clear which sample each value belongs"
        " to. Keep the samples in the first dimension and end with mean() or sum(), or with a loss of"
        " torch.nn.functional."
    )


# -- writing ----------------------------------------------------------------------------------------------------------


def _written(func: Callable[..., Any], args: Any, calls: Sequence[Any], known: list[KnowingTarget]) -> Any:
    """Write into each branch; what a target is written into becomes one, so that nothing is lost."""
    target, plan = args[0], known[0].plan
    if not isinstance(target, KnowingTarget) or not target.plan.open:
        if not isinstance(target, KnowingTarget) and type(target) is not Tensor:
            raise TypeError(f"{func.__name__} would write a target with two labels into a {type(target).__name__}.")
        own = _branch(target, 0).as_subclass(Tensor)
        target.__class__ = KnowingTarget  # the user may go on with the tensor itself, not with what is returned
        branches = (own, *(own.clone() for _ in calls[1:]))
        owners = next(
            (e.owners for e in known if e.owners is not None and own.ndim and len(e.owners) == len(own)), None
        )
        _know(cast(KnowingTarget, target), branches, plan, owners, known[0].number, False)
    for branch, (positional, named) in zip(target.branches, calls, strict=True):
        func(branch, *positional[1:], **named)
    target.is_loss = target.is_loss or any(each.is_loss for each in known) or target.branches[0].requires_grad
    return target


# -- arguments --------------------------------------------------------------------------------------------------------


def _branch(value: Any, number: int) -> Any:
    """An argument as one branch has it; a target of a batch that is over is plain."""
    if isinstance(value, KnowingTarget):
        return value.branches[number if value.plan.open else 0]
    if isinstance(value, tuple | list) and any(True for _ in _known_in(value)):
        return type(value)([_branch(each, number) for each in value])
    if isinstance(value, dict):
        return {name: _branch(each, number) for name, each in value.items()}
    return value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _known_in(value: Any) -> Iterator[KnowingTarget]:
    return (each for each in _tensors_in(value) if isinstance(each, KnowingTarget))
