"""Targets that look like plain labels, and make every loss that is computed from them the mixed one.

A target has one branch, or two: the labels, and the labels that they are mixed with. Every operation on it is done for
every branch, and the result is such a tensor again. To everybody else its value is that of the labels. A result that is
a single number and depends on the weights is a loss, whose value is ``lam * a + (1 - lam) * b``.

Where samples count differently (a ``lam`` per sample, or only the hardest ones), the branches are joined as soon as the
samples are summed, by a loss of torch or by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.divisors import SUMMED, Divisors
from lightning_tricks.core.mixed_targets.entry_weights import entry_weights
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
    divides,
    moves,
    named,
    reads_value,
    reduces_samples,
    uses_metadata_only,
    weighs,
    writes,
    writes_by_sample,
)
from lightning_tricks.core.mixed_targets.sample_ids import sample_ids_of
from lightning_tricks.core.mixed_targets.scores import SummedLosses
from lightning_tricks.core.mixed_targets.unmixed import UnmixedPart, require_no_part


class MixedTarget(torch.Tensor):
    """A tensor with one branch for every set of labels."""

    plan: LossPlan
    branches: tuple[Tensor, ...]
    sample_ids: Tensor | None  # the sample of every entry along the first dimension; None where samples count equally
    entry_weights: Tensor | None = None  # how much entries of a loss count in their sum, for the record; None for 1
    is_loss: bool  # whether the value depends on the weights
    unclear: str  # why the value cannot be a part of the loss; empty if it can

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Evaluate a function for every branch."""
        if UnmixedPart in types:  # its rules come first
            return NotImplemented
        return _evaluate(named(func), tuple(args), kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_tensor(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain_tensor(self), memo)


def mixed_target(branches: Sequence[Tensor], plan: LossPlan) -> MixedTarget:
    """Make a target from one or two branches of the same shape (B, ...)."""
    first = branches[0]
    sample_ids = plan.number_samples(len(first), first.device)
    return _with_branches(first.as_subclass(MixedTarget), branches, plan, sample_ids)


def _with_branches(
    target: MixedTarget,
    branches: Sequence[Tensor],
    plan: LossPlan,
    sample_ids: Tensor | None,
    is_loss: bool = False,
    unclear: str = "",
) -> MixedTarget:
    """Set the attributes of a target, and return it."""
    target.branches, target.plan, target.sample_ids = tuple(branches), plan, sample_ids
    target.is_loss, target.unclear = is_loss, unclear
    return target


def plain_tensor(target: Tensor) -> Tensor:
    """The value that a target, or a loss, has for code that does not know of branches, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # as in "Extending PyTorch" of torch's documentation
        return target.as_subclass(Tensor)


def returned_loss(loss: Any) -> Any:
    """A loss that a training step returns, as a plain tensor of the same graph; anything else as it is.

    What follows needs only its value and its gradient, and every operation on a target takes a dozen calls of Python.

    Raises:
        MisconfigurationException: If a part of the loss cannot follow the plan.
    """
    require_no_part(loss)
    if isinstance(loss, SummedLosses):
        return plain_tensor(loss)
    if not isinstance(loss, MixedTarget) or not loss.plan.open or not loss.is_loss or loss.branches[0].ndim:
        return loss
    with torch._C.DisableTorchFunctionSubclass():
        # DDP hands on the outputs of a forward pass in its autograd.Function _DDPSink, to find unused parameters.
        by_ddp = type(loss.grad_fn).__name__ == "_DDPSinkBackward"
    if not by_ddp:
        _require_branches(loss)
    if loss.unclear:
        raise loss.plan.unclear_loss(loss.unclear)
    return plain_tensor(loss)


def _require_branches(target: MixedTarget) -> None:
    """Raise for a target whose graph is not that of its branches."""
    with torch._C.DisableTorchFunctionSubclass():
        follows = target.branches[0].requires_grad or not target.requires_grad
    if not follows:
        raise target.plan.refusal(
            "the target went through an autograd.Function, which sees only one of its two labels: compute the loss with"
            " operations of torch."
        )


def _evaluate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets = [target for target in _targets_in((*args, *kwargs.values())) if target.plan.open]
    if not targets or uses_metadata_only(func, args):
        result = _plain_call(func, args, kwargs)
        return args[0] if args and isinstance(args[0], MixedTarget) and writes(func) else result
    of_losses = all([target.is_loss and not target.branches[0].ndim for target in targets])
    if of_losses and reads_value(func):  # a loss that is only logged
        return _plain_call(func, args, kwargs)
    for target in targets:
        _require_branches(target)
    if kwargs.get("out") is not None:
        raise targets[0].plan.refusal(f"{func.__name__}(out=...) of a target with two labels: leave out= out.")
    if differentiates(func):
        if reason := next((target.unclear for target in targets if target.unclear), ""):
            raise targets[0].plan.unclear_loss(reason)
        if any(target.branches[0].ndim for target in targets):
            raise RuntimeError(f"{func.__name__}() of the losses of several samples: reduce them to one number first.")
        if func.__name__ in ("backward", "grad"):
            return _plain_call(func, args, kwargs)
        for target in targets:  # the hook must see the mixed loss in all branches
            target.branches = (plain_tensor(target),) * len(target.branches)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if writes(func):
        return _write(func, args, kwargs, targets)
    plan = targets[0].plan
    calls = [_arguments(args, kwargs, number) for number in range(len(targets[0].branches))]
    if plan.mix_predictions is not None and is_loss(func):
        calls = [((), _mixed(arguments(func, *call), plan, *plan.mix_predictions)) for call in calls]
    if plan.change_arguments is not None and is_loss(func):
        calls = [((), plan.change_arguments(func, arguments(func, *call))) for call in calls]
    unclear = next((target.unclear for target in targets if target.unclear), "")
    if plan.by_samples and not unclear:
        try:
            if (loss := _by_samples(func, calls, targets)) is not None:
                plan.losses += loss.requires_grad
                return loss
        except AmbiguousSamples as error:  # the value may only be logged
            unclear = str(error)
    first = func(*calls[0][0], **calls[0][1])
    if of_losses and not (isinstance(first, Tensor) and first.is_floating_point()):  # as a number, it is only logged
        return _plain_call(func, args, kwargs)
    if not _has_tensor(first):
        return first
    if plan.divisors is not None and not plan.by_samples and isinstance(first, Tensor) and unclear in ("", SUMMED):
        unclear = _undivided(func, calls[0], first, targets, plan.divisors)
    results = [first, *(func(*arguments, **named) for arguments, named in calls[1:])]
    joined = _join(results, func, calls, args, targets, unclear)
    if plan.record is not None and _is_of_losses(joined):
        known = [value.entry_weights for value in (*args, *kwargs.values()) if _is_of_losses(value)]
        joined.entry_weights = entry_weights(func, calls[0], _of_weights(args, kwargs), known, joined.branches[0])
    return joined


def _undivided(
    func: Callable[..., Any], call: Any, result: Tensor, targets: list[MixedTarget], divisors: Divisors
) -> str:
    """Why a result does not say by how many targets its losses are divided, which is noted; empty if it does."""
    losses = [target.branches[0] for target in targets if target.is_loss and target.branches[0].ndim]
    if is_loss(func):
        return divisors.note_loss(func, arguments(func, *call))
    if losses:
        return divisors.note_reduction(func, losses[0], result)
    summed = any(target.unclear == SUMMED for target in targets)
    if summed and divides(func) and not result.ndim:
        return divisors.note_division([*call[0], *call[1].values()][1])
    return SUMMED if summed else ""


def _join(
    results: Sequence[Any],
    func: Callable[..., Any],
    calls: Sequence[Any],
    args: Any,
    targets: list[MixedTarget],
    unclear: str,
) -> Any:
    """Join the results of all branches in one target."""
    first, plan = results[0], targets[0].plan
    if isinstance(first, tuple | list):
        items = zip(*results, strict=True)
        return type(first)([_join(item, func, calls, args, targets, unclear) for item in items])
    if not isinstance(first, Tensor):
        return first
    of_torch = is_loss(func) or any(target.is_loss for target in targets)
    if first.requires_grad and not of_torch and plan.needs_torch_loss:
        unclear = f"{func.__name__}() of the target. Compute the loss by a function of torch.nn.functional."
    loss = first.is_floating_point() and (first.requires_grad or of_torch)
    value, sample_ids = first, None
    if first.ndim and plan.by_samples:
        moved = bool(args) and isinstance(args[0], MixedTarget) and moves(func)
        known = [(target.sample_ids, target.branches[0].ndim) for target in targets]
        sample_ids = sample_ids_of(func, calls, results, known, moved, plan)
    elif loss and not first.ndim:
        if plan.by_samples:
            unclear = unclear or ambiguous_samples(func)
        else:
            value = torch.lerp(results[1], first, plan.lam) if len(results) > 1 else first
            plan.losses += value.requires_grad
            if value is not first and type(value) is Tensor:
                value.__class__ = MixedTarget  # as_subclass would add a node to the graph
    elif plan.by_samples and not moves(func):
        return first  # a number of samples, for example, which is the same in all branches
    plan.unclear = unclear if loss and unclear else plan.unclear
    target = value if isinstance(value, MixedTarget) else value.as_subclass(MixedTarget)
    return _with_branches(target, results, plan, sample_ids, loss, unclear)


def _mixed(call: dict[str, Any], plan: LossPlan, lam: float, partners: Tensor) -> dict[str, Any]:
    """The arguments of a loss, with the predictions for a sample mixed with those for its partner."""
    name, predictions = next(iter(call.items()))
    if not predictions.requires_grad or len(predictions) != len(partners):
        raise plan.refusal(
            f"the predictions, the first argument of a loss, need one entry per sample, got {tuple(predictions.shape)}"
            f" for {len(partners)} samples."
        )
    return {**call, name: torch.lerp(predictions[partners], predictions, lam)}


def _write(func: Callable[..., Any], args: Any, kwargs: Any, targets: list[MixedTarget]) -> Any:
    """Write into every branch; a plain tensor that a target is written into becomes a target itself."""
    target, *rest = args
    if not isinstance(target, MixedTarget) or not target.plan.open:
        # A running sum of losses for the log, for example; with a graph it may become the loss.
        traced = torch.is_grad_enabled() and any(t.branches[0].requires_grad for t in targets)
        if not traced and all(not t.branches[0].ndim and t.is_floating_point() for t in targets):
            return _plain_call(func, args, kwargs)
        if not isinstance(target, MixedTarget) and (type(target) is not Tensor or target._is_view()):
            raise targets[0].plan.refusal(
                f"{func.__name__} would write from the target, which has two labels, into a part of a tensor, or into a"
                f" {type(target).__name__}: write into a full tensor, or make a new one."
            )
        plain = _branch(target, None).as_subclass(Tensor)
        # A scalar shows the mixed loss; any other tensor shows its first branch.
        branches = (plain if plain.ndim else plain.clone(), *(plain.clone() for _ in targets[0].branches[1:]))
        known = [t.sample_ids for t in targets if t.sample_ids is not None and len(t.sample_ids) == len(plain)]
        sample_ids = known[0] if known and writes_by_sample(func, (plain, *rest), kwargs) else None
        target.__class__ = MixedTarget  # the user may go on with the tensor itself, and not with what is returned here
        _with_branches(cast(MixedTarget, target), branches, targets[0].plan, sample_ids)
    if target.plan.record is not None and weighs(func) and _is_of_losses(target):
        of_weights, named = _of_weights(args, kwargs)
        func(*of_weights, **named)
        target.entry_weights = of_weights[0]
    for number, into in enumerate(target.branches):
        others, named = _arguments(rest, kwargs, number)
        func(into, *others, **named)
    target.is_loss = target.is_loss or any(source.is_loss for source in targets) or target.branches[0].requires_grad
    target.unclear = target.unclear or next((source.unclear for source in targets if source.unclear), "")
    if target.is_loss and not target.branches[0].ndim and len(target.branches) > 1:
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(target.plan.lam * target.branches[0] + (1 - target.plan.lam) * target.branches[1])
    return target


def _branch(value: Any, number: int | None) -> Any:
    """The value of an argument in the branch of this number; in no branch (None), its plain value."""
    if not isinstance(value, _HOLDERS):
        return value
    if isinstance(value, MixedTarget):
        return plain_tensor(value) if number is None or not value.plan.open else value.branches[number]
    if not _targets_in([value]):
        return value
    if isinstance(value, dict):
        return {name: _branch(item, number) for name, item in value.items()}
    return type(value)([_branch(item, number) for item in value])


def _arguments(
    args: Sequence[Any], kwargs: dict[str, Any], number: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function in the branch of this number, or in none."""
    return tuple([_branch(value, number) for value in args]), {key: _branch(kwargs[key], number) for key in kwargs}


def _plain_call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a function for the value that a target has for everybody else."""
    args, kwargs = _arguments(args, kwargs, None)
    return func(*args, **kwargs)


_CONTAINERS = (tuple, list, dict)  # faster than a union, which would be built anew for every argument
_HOLDERS = (MixedTarget, *_CONTAINERS)


def _targets_in(values: Iterable[Any]) -> list[MixedTarget]:
    """The targets among the arguments of a function."""
    found: list[MixedTarget] = []
    for value in values:
        if isinstance(value, MixedTarget):
            found.append(value)
        elif isinstance(value, _CONTAINERS):
            found += _targets_in(value.values() if isinstance(value, dict) else value)
    return found


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))


# -- where samples count differently ----------------------------------------------------------------------------------


def _by_samples(func: Callable[..., Any], calls: Sequence[Any], targets: list[MixedTarget]) -> Tensor | None:
    """The result of a reduction over the samples, by a loss of torch or by hand; None for any other function."""
    plan, sample_ids = (
        targets[0].plan,
        next((target.sample_ids for target in targets if target.sample_ids is not None), None),
    )
    if is_loss(func):
        named = [arguments(func, *call) for call in calls]
        if plan.observe is not None and sample_ids is not None:
            plan.observe(func.__name__, named[0], sample_ids)
        return None if named[0]["reduction"] == "none" else planned_loss(func, named, sample_ids, plan)
    if targets[0].is_loss and not targets[0].unclear and reduces_samples(func, *calls[0]):
        return planned_reduction(func, calls, sample_ids, plan, targets[0].entry_weights)
    return None


def _is_of_losses(value: Any) -> bool:
    """Whether a value is a target with several losses."""
    return isinstance(value, MixedTarget) and value.is_loss and value.branches[0].ndim > 0


def _of_weights(args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function with the weights of losses in place of the losses."""

    def weights(value: Any) -> Any:
        if not _is_of_losses(value):
            return _branch(value, 0)
        return torch.ones_like(value.branches[0]) if value.entry_weights is None else value.entry_weights.clone()

    return tuple(map(weights, args)), {name: weights(value) for name, value in kwargs.items()}
