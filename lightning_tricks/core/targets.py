"""Targets that know: to everybody the plain labels, in a loss what a trick makes of them.

Every operation on such a target is done for each of its branches: the labels, and those that they are mixed with. What
comes of it is such a tensor again. Its own value is that of the labels or, where it is a single number that depends on
the weights, ``lam * a + (1 - lam) * b``: the loss of the step, whatever it is made of.

Where samples count differently (a ``lam`` for each, or the hardest alone), the branches become one already where the
samples are summed up, by a loss of torch or by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_tricks.core.functions import (
    differentiates,
    is_elementwise,
    keeps_samples,
    moves,
    reduces_samples,
    uses_form_only,
    writes,
    writes_by_sample,
)
from lightning_tricks.core.losses import arguments, is_loss, loss_by_samples, sum_by_samples, unknown_samples
from lightning_tricks.core.plan import Plan


class KnowingTarget(torch.Tensor):
    """A tensor with a branch for each set of labels."""

    plan: Plan
    branches: tuple[Tensor, ...]
    owners: Tensor | None  # the sample that each entry along the first dimension belongs to, where samples matter
    is_loss: bool  # whether it depends on the weights

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


def knowing(branches: Sequence[Tensor], plan: Plan) -> KnowingTarget:
    """A target of one or two branches of the same shape, the samples first."""
    first, plan.samples = branches[0], len(branches[0])
    owners = torch.arange(len(first), device=first.device) if plan.by_samples else None
    return know(first.as_subclass(KnowingTarget), branches, plan, owners)


def know(
    target: KnowingTarget, branches: Sequence[Tensor], plan: Plan, owners: Tensor | None, is_loss: bool = False
) -> KnowingTarget:
    """Tell a tensor its branches."""
    target.branches, target.plan, target.owners, target.is_loss = tuple(branches), plan, owners, is_loss
    return target


def own(target: KnowingTarget) -> Tensor:
    """The value that a target has for everybody, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # torch's own way, from "Extending torch" in its documentation
        return target.as_subclass(Tensor)


def _evaluated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = [each for each in _targets_in((args, kwargs)) if each.plan.open]
    if not known or uses_form_only(func, args):
        return func(*_branch(args, None), **_branch(kwargs, None))
    with torch._C.DisableTorchFunctionSubclass():
        if any(each.requires_grad and not each.branches[0].requires_grad for each in known):
            raise RuntimeError(
                "A target with two labels went through an autograd.Function, which sees only one of them: compute the"
                " loss by operations of torch."
            )
    if kwargs.get("out") is not None:
        raise TypeError(f"{func.__name__}(out=...) of a target with two labels: leave out= out.")
    if differentiates(func):
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
        calls = [((), _mixed(arguments(func, *call), *plan.mix_predictions)) for call in calls]
    if plan.by_samples and (loss := _by_samples(func, calls, known)) is not None:
        plan.losses += loss.requires_grad
        return loss
    first = func(*calls[0][0], **calls[0][1])
    if next(_tensors_in(first), None) is None:
        return first
    results = [first, *(func(*each, **named) for each, named in calls[1:])]
    return _together(results, func, calls, args, known)


def _together(
    results: Sequence[Any], func: Callable[..., Any], calls: Sequence[Any], args: Any, known: list[KnowingTarget]
) -> Any:
    """The results of all branches as one."""
    first, plan = results[0], known[0].plan
    if isinstance(first, tuple | list):
        return type(first)([_together(each, func, calls, args, known) for each in zip(*results, strict=True)])
    if not isinstance(first, Tensor):
        return first
    of_torch = is_loss(func) or any(each.is_loss for each in known)
    if first.requires_grad and not of_torch and plan.needs_torch_loss:
        raise RuntimeError(
            f"{func.__name__}() of a target and of what depends on the weights, where samples or predictions are"
            " compared by a loss of torch.nn.functional: use one."
        )
    loss = first.is_floating_point() and (first.requires_grad or of_torch)
    value, owners = first, None
    if plan.by_samples and first.ndim:
        owners = _owners(func, calls, results, args, known)
    elif loss and not first.ndim:
        if plan.by_samples:
            raise unknown_samples(func)
        value = plan.lam * first + (1 - plan.lam) * results[1]
        plan.losses += value.requires_grad
    elif plan.by_samples and not moves(func):
        return first  # such as how many there are, which is the same in all branches
    return know(value.as_subclass(KnowingTarget), results, plan, owners, loss)


def _mixed(call: dict[str, Any], lam: float, partners: Tensor) -> dict[str, Any]:
    """A loss's arguments with the predictions of each sample mixed with its partner's."""
    name, predictions = next(iter(call.items()))
    if not predictions.requires_grad or len(predictions) != len(partners):
        raise RuntimeError(
            f"Predictions, the first argument of a loss, are mixed sample by sample, got {tuple(predictions.shape)} for"
            f" {len(partners)} samples."
        )
    return {**call, name: torch.lerp(predictions[partners], predictions, lam)}


def _written(func: Callable[..., Any], args: Any, kwargs: Any, known: list[KnowingTarget]) -> Any:
    """Write into each branch; what labels are written into knows them from then on, so that nothing is lost."""
    target, *rest = args
    if not isinstance(target, KnowingTarget) or not target.plan.open:
        if all(not each.branches[0].ndim and each.is_floating_point() for each in known):  # a sum, such as of losses
            return func(*_branch(args, None), **_branch(kwargs, None))
        if not isinstance(target, KnowingTarget) and (type(target) is not Tensor or target._is_view()):
            raise RuntimeError(
                f"{func.__name__} would write a target with two labels into a part of a tensor, or into a"
                f" {type(target).__name__}: write into a whole tensor, or make a new one."
            )
        plain = _branch(target, None).as_subclass(Tensor)
        branches = (plain, *(plain.clone() for _ in known[0].branches[1:]))
        clear = [e.owners for e in known if e.owners is not None and len(e.owners) == len(plain)]
        owners = clear[0] if clear and writes_by_sample(func, (plain, *rest), kwargs) else None
        target.__class__ = KnowingTarget  # the user may go on with the tensor itself, not with what is returned
        know(cast(KnowingTarget, target), branches, known[0].plan, owners)
    for number, into in enumerate(target.branches):
        func(into, *_branch(tuple(rest), number), **_branch(kwargs, number))
    target.is_loss = target.is_loss or any(each.is_loss for each in known) or target.branches[0].requires_grad
    if target.is_loss and not target.branches[0].ndim:
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(target.plan.lam * target.branches[0] + (1 - target.plan.lam) * target.branches[1])
    return target


def _branch(value: Any, number: int | None) -> Any:
    """An argument as one branch has it; None for the value that it has for everybody."""
    if isinstance(value, KnowingTarget):
        return own(value) if number is None or not value.plan.open else value.branches[number]
    if isinstance(value, tuple | list) and next(_targets_in(value), None) is not None:
        return type(value)([_branch(each, number) for each in value])
    if isinstance(value, dict):
        return {name: _branch(each, number) for name, each in value.items()}
    return value


def _targets_in(value: Any) -> Iterator[KnowingTarget]:
    """The targets among the arguments of a function."""
    return (each for each in _tensors_in(value) if isinstance(each, KnowingTarget))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


# -- where samples count differently ----------------------------------------------------------------------------------


def _by_samples(func: Callable[..., Any], calls: Sequence[Any], known: list[KnowingTarget]) -> Tensor | None:
    """A reduction over the samples, by a loss of torch or by hand; None for any other function."""
    plan, owners = known[0].plan, next((each.owners for each in known if each.owners is not None), None)
    if is_loss(func):
        named = [arguments(func, *call) for call in calls]
        return None if named[0]["reduction"] == "none" else loss_by_samples(func, named, owners, plan)
    if known[0].is_loss and reduces_samples(func, *calls[0]):
        return sum_by_samples(func, calls, owners, plan)
    return None


def _owners(
    func: Callable[..., Any], calls: Sequence[Any], results: Sequence[Tensor], args: Any, known: list[KnowingTarget]
) -> Tensor | None:
    """The sample of each entry of a result, the same in all branches; None if that is not clear."""
    source, same = args[0] if args else None, all(each.shape == results[0].shape for each in results)
    if not same:
        return None
    if moves(func) and isinstance(source, KnowingTarget):
        return None if source.owners is None else _moved(func, source.owners, calls, results[0])
    if any(each.owners is None and each.branches[0].ndim for each in known):
        return None
    found = [each.owners for each in known if each.owners is not None and len(each.owners) == len(results[0])]
    if is_elementwise(func) and any(each.branches[0].ndim not in (0, results[0].ndim) for each in known):
        return None  # broadcast along another dimension
    clear = keeps_samples(func, *calls[0]) or is_loss(func)
    return found[0] if clear and found and all(torch.equal(found[0], each) for each in found[1:]) else None


def _moved(func: Callable[..., Any], owners: Tensor, calls: Sequence[Any], result: Tensor) -> Tensor | None:
    rows = []
    for args, kwargs in calls:
        marks = owners.view(-1, *[1] * (args[0].ndim - 1)).expand(args[0].shape).contiguous()
        marks = func(marks, *args[1:], **kwargs)
        if not isinstance(marks, Tensor) or marks.shape != result.shape or not marks.numel():
            return None
        marks = marks.reshape(len(marks), -1)
        rows.append(marks)
    first = rows[0][:, 0]
    return first if all((each == first[:, None]).all() for each in rows) else None
