"""Targets that know: to everybody the plain labels, in a loss what a trick makes of them.

Every operation on such a target is done for each of its branches: the labels, and those that they are mixed with. What
comes of it is such a tensor again. Its own value is that of the labels or, where it is a single number that depends on
the weights, ``lam * a + (1 - lam) * b``: the loss of the step, whatever it is made of.

Where samples count differently (a ``lam`` for each, or the hardest alone), the branches become one already where the
samples are summed up, by a loss of torch or by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.losses import (
    AmbiguousSamples,
    ambiguous_samples,
    arguments,
    is_loss,
    planned_loss,
    planned_reduction,
)
from lightning_tricks.core.mixed_targets.operations import (
    differentiates,
    moves,
    reduces_samples,
    uses_metadata_only,
    writes,
    writes_by_sample,
)
from lightning_tricks.core.mixed_targets.sample_ids import sample_ids_of


class MixedTarget(torch.Tensor):
    """A tensor with a branch for each set of labels."""

    plan: LossPlan
    branches: tuple[Tensor, ...]
    owners: Tensor | None  # the sample that each entry along the first dimension belongs to, where samples matter
    is_loss: bool  # whether it depends on the weights
    unclear: str  # why it cannot be a part of the loss, if it cannot

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Evaluate a function for each branch."""
        return _evaluated(func, tuple(args), kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return own(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(own(self), memo)


def mixed_target(branches: Sequence[Tensor], plan: LossPlan) -> MixedTarget:
    """A target of one or two branches of the same shape, the samples first."""
    first, plan.samples = branches[0], len(branches[0])
    owners = torch.arange(len(first), device=first.device) if plan.by_samples else None
    return _with_branches(first.as_subclass(MixedTarget), branches, plan, owners)


def _with_branches(
    target: MixedTarget,
    branches: Sequence[Tensor],
    plan: LossPlan,
    owners: Tensor | None,
    is_loss: bool = False,
    unclear: str = "",
) -> MixedTarget:
    """Tell a tensor its branches."""
    target.branches, target.plan, target.owners = tuple(branches), plan, owners
    target.is_loss, target.unclear = is_loss, unclear
    return target


def own(target: MixedTarget) -> Tensor:
    """The value that a target has for everybody, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # torch's own way, from "Extending torch" in its documentation
        return target.as_subclass(Tensor)


def _evaluated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = [each for each in _targets_in((*args, *kwargs.values())) if each.plan.open]
    if not known or uses_metadata_only(func, args):
        result = func(*_branch(args, None), **_branch(kwargs, None))
        return args[0] if args and isinstance(args[0], MixedTarget) and writes(func) else result
    with torch._C.DisableTorchFunctionSubclass():
        if any(each.requires_grad and not each.branches[0].requires_grad for each in known):
            raise known[0].plan.refusal(
                "the target went through an autograd.Function, which sees only one of its two labels: compute the loss"
                " by operations of torch."
            )
    if kwargs.get("out") is not None:
        raise known[0].plan.refusal(f"{func.__name__}(out=...) of a target with two labels: leave out= out.")
    if differentiates(func):
        if reason := next((each.unclear for each in known if each.unclear), ""):
            raise known[0].plan.unclear_loss(reason)
        if any(each.branches[0].ndim for each in known):
            raise RuntimeError(f"{func.__name__}() of the losses of several samples: make one number of them first.")
        if func.__name__ in ("backward", "grad"):
            return func(*_branch(args, None), **_branch(kwargs, None))
        for each in known:  # a hook on the loss is for what comes of it, too
            each.branches = (own(each),) * len(each.branches)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if writes(func):
        return _written(func, args, kwargs, known)
    if all(each.is_loss and not each.branches[0].ndim for each in known):
        result = func(*_branch(args, None), **_branch(kwargs, None))
        floating = isinstance(result, Tensor) and result.is_floating_point()
        if not floating or func.__name__ in ("detach", "__get__"):  # for the record
            return result
    calls = [(_branch(args, number), _branch(kwargs, number)) for number in range(len(known[0].branches))]
    plan = known[0].plan
    if plan.mix_predictions is not None and is_loss(func):
        calls = [((), _mixed(arguments(func, *call), plan, *plan.mix_predictions)) for call in calls]
    unclear = ""
    if plan.by_samples:
        try:
            if (loss := _by_samples(func, calls, known)) is not None:
                plan.losses += loss.requires_grad
                return loss
        except AmbiguousSamples as error:  # it may be for the record only
            unclear = str(error)
    first = func(*calls[0][0], **calls[0][1])
    if not _has_tensor(first):
        return first
    results = [first, *(func(*each, **named) for each, named in calls[1:])]
    return _together(results, func, calls, args, known, unclear)


def _together(
    results: Sequence[Any],
    func: Callable[..., Any],
    calls: Sequence[Any],
    args: Any,
    known: list[MixedTarget],
    unclear: str,
) -> Any:
    """The results of all branches as one."""
    first, plan = results[0], known[0].plan
    if isinstance(first, tuple | list):
        return type(first)([_together(each, func, calls, args, known, unclear) for each in zip(*results, strict=True)])
    if not isinstance(first, Tensor):
        return first
    of_torch = is_loss(func) or any(each.is_loss for each in known)
    unclear = unclear or next((each.unclear for each in known if each.unclear), "")
    if first.requires_grad and not of_torch and plan.needs_torch_loss:
        unclear = f"{func.__name__}() of the target. Compute the loss by a function of torch.nn.functional."
    loss = first.is_floating_point() and (first.requires_grad or of_torch)
    value, owners = first, None
    if plan.by_samples and first.ndim:
        moved = bool(args) and isinstance(args[0], MixedTarget) and moves(func)
        owners = sample_ids_of(func, calls, results, [(e.owners, e.branches[0].ndim) for e in known], moved)
    elif loss and not first.ndim:
        if plan.by_samples:
            unclear = unclear or ambiguous_samples(func)
        else:
            value = torch.lerp(results[1], first, plan.lam) if len(results) > 1 else first
            plan.losses += value.requires_grad
    elif plan.by_samples and not moves(func):
        return first  # such as how many there are, which is the same in all branches
    plan.unclear = unclear if loss and unclear else plan.unclear
    return _with_branches(value.as_subclass(MixedTarget), results, plan, owners, loss, unclear)


def _mixed(call: dict[str, Any], plan: LossPlan, lam: float, partners: Tensor) -> dict[str, Any]:
    """A loss's arguments with the predictions of each sample mixed with its partner's."""
    name, predictions = next(iter(call.items()))
    if not predictions.requires_grad or len(predictions) != len(partners):
        raise plan.refusal(
            f"predictions, the first argument of a loss, are mixed sample by sample, got {tuple(predictions.shape)} for"
            f" {len(partners)} samples."
        )
    return {**call, name: torch.lerp(predictions[partners], predictions, lam)}


def _written(func: Callable[..., Any], args: Any, kwargs: Any, known: list[MixedTarget]) -> Any:
    """Write into each branch; what labels are written into knows them from then on, so that nothing is lost."""
    target, *rest = args
    if not isinstance(target, MixedTarget) or not target.plan.open:
        if all(not each.branches[0].ndim and each.is_floating_point() for each in known):  # a sum, such as of losses
            return func(*_branch(args, None), **_branch(kwargs, None))
        if not isinstance(target, MixedTarget) and (type(target) is not Tensor or target._is_view()):
            raise known[0].plan.refusal(
                f"{func.__name__} would write from the target, which has two labels, into a part of a tensor, or into a"
                f" {type(target).__name__}: write into an entire one, or make a new one."
            )
        plain = _branch(target, None).as_subclass(Tensor)
        branches = (plain, *(plain.clone() for _ in known[0].branches[1:]))
        clear = [e.owners for e in known if e.owners is not None and len(e.owners) == len(plain)]
        owners = clear[0] if clear and writes_by_sample(func, (plain, *rest), kwargs) else None
        target.__class__ = MixedTarget  # the user may go on with the tensor itself, not with what is returned
        _with_branches(cast(MixedTarget, target), branches, known[0].plan, owners)
    for number, into in enumerate(target.branches):
        func(into, *_branch(tuple(rest), number), **_branch(kwargs, number))
    target.is_loss = target.is_loss or any(each.is_loss for each in known) or target.branches[0].requires_grad
    target.unclear = target.unclear or next((each.unclear for each in known if each.unclear), "")
    if target.is_loss and not target.branches[0].ndim and len(target.branches) > 1:
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(target.plan.lam * target.branches[0] + (1 - target.plan.lam) * target.branches[1])
    return target


def _branch(value: Any, number: int | None) -> Any:
    """An argument as one branch has it; None for the value that it has for everybody."""
    if isinstance(value, MixedTarget):
        return own(value) if number is None or not value.plan.open else value.branches[number]
    if isinstance(value, dict):
        return {name: _branch(each, number) for name, each in value.items()}
    if isinstance(value, _LISTS) and _targets_in(value):
        return type(value)([_branch(each, number) for each in value])
    return value


_LISTS = (tuple, list)  # quicker to look for than a union, which would be made for each argument of each function


def _targets_in(values: Iterable[Any]) -> list[MixedTarget]:
    """The targets among the arguments of a function."""
    found: list[MixedTarget] = []
    for value in values:
        if isinstance(value, MixedTarget):
            found.append(value)
        elif isinstance(value, dict):
            found += _targets_in(value.values())
        elif isinstance(value, _LISTS):
            found += _targets_in(value)
    return found


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))


# -- where samples count differently ----------------------------------------------------------------------------------


def _by_samples(func: Callable[..., Any], calls: Sequence[Any], known: list[MixedTarget]) -> Tensor | None:
    """A reduction over the samples, by a loss of torch or by hand; None for any other function."""
    plan, owners = known[0].plan, next((each.owners for each in known if each.owners is not None), None)
    if is_loss(func):
        named = [arguments(func, *call) for call in calls]
        return None if named[0]["reduction"] == "none" else planned_loss(func, named, owners, plan)
    if known[0].is_loss and not known[0].unclear and reduces_samples(func, *calls[0]):
        return planned_reduction(func, calls, owners, plan)
    return None
