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
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.divisors import SUMMED, Divisors
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.losses import (
    AmbiguousSamples,
    ambiguous_samples,
    planned_loss,
    planned_reduction,
    sample_ids_of,
)
from lightning_tricks.core.mixed_targets.operations import (
    Kind,
    arguments,
    divides,
    kind_of,
    moves,
    named,
    reduces_samples,
    weighs,
    writes_by_sample,
)
from lightning_tricks.core.mixed_targets.scores import Call, SummedLosses, weights_in_loss, weights_in_result
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
        """Evaluate a function for every branch, in the way of its kind."""
        if UnmixedPart in types:  # its rules come first
            return NotImplemented
        return _evaluate(_call(named(func), tuple(args), kwargs or {}))

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


@dataclass
class _Call:
    """A call of a function of torch with targets among its arguments.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        kind: What it does.
        targets: The targets among its arguments, but for those of batches that are done.
        unclear: Why its result cannot be a part of the loss; empty if it can.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: Kind
    targets: list[MixedTarget]
    unclear: str

    @property
    def plan(self) -> LossPlan:
        """The plan of the batch."""
        return self.targets[0].plan

    @property
    def of_numbers(self) -> bool:
        """Whether all targets are losses of the batch, single numbers."""
        return all([target.is_loss and not target.branches[0].ndim for target in self.targets])

    def in_branches(self) -> list[Call]:
        """The arguments in every branch."""
        return [_arguments(self.args, self.kwargs, number) for number in range(len(self.targets[0].branches))]

    def plainly(self) -> Any:
        """The result for the value that a target has for everybody else."""
        args, kwargs = _arguments(self.args, self.kwargs, None)
        return self.func(*args, **kwargs)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    targets = [target for target in _targets_in((*args, *kwargs.values())) if target.plan.open]
    unclear = next((target.unclear for target in targets if target.unclear), "")
    return _Call(func, args, kwargs, kind_of(func, args), targets, unclear)


def _evaluate(call: _Call) -> Any:
    if not call.targets:
        result = call.plainly()
        target = call.args[0] if call.kind is Kind.WRITE and call.args else None
        return target if isinstance(target, MixedTarget) else result
    if call.kind is Kind.FORM or (call.kind is Kind.READ and call.of_numbers):  # a loss that is only logged
        return call.plainly()
    for target in call.targets:
        _require_branches(target)
    if call.kwargs.get("out") is not None:
        raise call.plan.refusal(f"{call.func.__name__}(out=...) of a target with two labels: leave out= out.")
    match call.kind:
        case Kind.GRAPH:
            return _differentiated(call)
        case Kind.WRITE:
            return _written(call)
        case Kind.LOSS:
            return _loss(call)
        case Kind.REDUCTION:
            return _reduction(call)
        case _:
            return _value(call)


# -- a function for each kind -----------------------------------------------------------------------------------------


def _differentiated(call: _Call) -> Any:
    """The gradient of the mixed loss, or a hook on it."""
    name = call.func.__name__
    if call.unclear:
        raise call.plan.unclear_loss(call.unclear)
    if any(target.branches[0].ndim for target in call.targets):
        raise RuntimeError(f"{name}() of the losses of several samples: reduce them to one number first.")
    if name in ("backward", "grad"):
        return call.plainly()
    for target in call.targets:  # the hook must see the mixed loss in all branches
        target.branches = (plain_tensor(target),) * len(target.branches)
    with torch._C.DisableTorchFunctionSubclass():
        return call.func(*call.args, **call.kwargs)


def _loss(call: _Call) -> Any:
    """A loss of torch: mixed as the plan says, or the losses of all entries as a target."""
    plan, func, unnamed = call.plan, call.func, call.in_branches()
    if not (plan.by_samples or plan.needs_torch_loss):  # Binding the arguments to names would take as long as the loss.
        return _joined(call, unnamed, [func(*args, **kwargs) for args, kwargs in unnamed])
    calls = [arguments(func, *given) for given in unnamed]
    if plan.mix_predictions is not None:
        calls = [_with_mixed_predictions(given, plan, *plan.mix_predictions) for given in calls]
    if plan.change_arguments is not None:
        calls = [plan.change_arguments(func, given) for given in calls]
    if plan.by_samples and not call.unclear:
        sample_ids = _first_sample_ids(call)
        if plan.observe is not None and sample_ids is not None:
            plan.observe(func.__name__, calls[0], sample_ids)
        if calls[0]["reduction"] != "none":
            try:
                return _noted(planned_loss(func, calls, sample_ids, plan), plan)
            except AmbiguousSamples as error:  # the value may only be logged
                call.unclear = str(error)
    results = [func(**given) for given in calls]
    if _asks_for_divisors(call):
        call.unclear = cast(Divisors, plan.divisors).note_loss(func, calls[0])
    loss = _joined(call, [((), given) for given in calls], results)
    if plan.record is not None and _is_of_losses(loss):
        weights = weights_in_loss(func, calls[0])
        loss.entry_weights = None if weights is None else weights.to(loss.branches[0].dtype)
    return loss


def _reduction(call: _Call) -> Any:
    """A sum or a mean: by the plan, if it is one of losses of samples that count differently."""
    losses, calls = call.targets[0], call.in_branches()
    if call.plan.by_samples and losses.is_loss and not call.unclear and reduces_samples(call.func, *calls[0]):
        sample_ids = _first_sample_ids(call)
        try:
            return _noted(planned_reduction(call.func, calls, sample_ids, call.plan, losses.entry_weights), call.plan)
        except AmbiguousSamples as error:  # the value may only be logged
            call.unclear = str(error)
    return _value(call)


def _value(call: _Call) -> Any:
    """The result of any other function in every branch, as a target; a number that is only logged as it is."""
    plan, func, calls = call.plan, call.func, call.in_branches()
    first = func(*calls[0][0], **calls[0][1])
    if call.of_numbers and not (isinstance(first, Tensor) and first.is_floating_point()):
        return call.plainly()
    if not _has_tensor(first):
        return first
    if _asks_for_divisors(call):
        call.unclear = _undivided(call, calls[0], first)
    value = _joined(call, calls, [first, *(func(*args, **kwargs) for args, kwargs in calls[1:])])
    if plan.record is not None and _is_of_losses(value):
        known = [given.entry_weights for given in (*call.args, *call.kwargs.values()) if _is_of_losses(given)]
        value.entry_weights = weights_in_result(func, _of_weights(call.args, call.kwargs), known, value.branches[0])
    return value


def _written(call: _Call) -> Any:
    """Write into every branch; a plain tensor that a target is written into becomes a target itself."""
    func, kwargs, (target, *rest) = call.func, call.kwargs, call.args
    if not isinstance(target, MixedTarget) or not target.plan.open:
        # A running sum of losses for the log, for example; with a graph it may become the loss.
        traced = torch.is_grad_enabled() and any(source.branches[0].requires_grad for source in call.targets)
        numbers = all(not source.branches[0].ndim and source.is_floating_point() for source in call.targets)
        if numbers and not traced:
            return call.plainly()
        _make_target(target, call)
    if target.plan.record is not None and weighs(func) and _is_of_losses(target):
        of_weights, named_weights = _of_weights(call.args, kwargs)
        func(*of_weights, **named_weights)
        target.entry_weights = of_weights[0]
    for number, into in enumerate(target.branches):
        others, named_others = _arguments(rest, kwargs, number)
        func(into, *others, **named_others)
    target.is_loss = target.is_loss or any(source.is_loss for source in call.targets)
    target.is_loss = target.is_loss or target.branches[0].requires_grad
    target.unclear = target.unclear or call.unclear
    if target.is_loss and not target.branches[0].ndim:
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(_mixed(target.branches, target.plan))
    return target


# -- what they share --------------------------------------------------------------------------------------------------


def _joined(call: _Call, calls: Sequence[Call], results: Sequence[Any]) -> Any:
    """The results of all branches as one target, or as several."""
    first, plan, func, unclear = results[0], call.plan, call.func, call.unclear
    if isinstance(first, tuple | list):
        return type(first)([_joined(call, calls, item) for item in zip(*results, strict=True)])
    if not isinstance(first, Tensor):
        return first
    of_torch = call.kind is Kind.LOSS or any(target.is_loss for target in call.targets)
    if first.requires_grad and not of_torch and plan.needs_torch_loss:
        unclear = f"{func.__name__}() of the target. Compute the loss by a function of torch.nn.functional."
    is_loss = first.is_floating_point() and (first.requires_grad or of_torch)
    value, sample_ids = first, None
    if plan.by_samples:
        if first.ndim:
            sample_ids = _sample_ids(call, calls, results)
        elif is_loss:
            unclear = unclear or ambiguous_samples(func)
        elif not moves(func):
            return first  # a number of samples, for example, which is the same in all branches
    elif is_loss and not first.ndim:
        value = _noted(_mixed(results, plan), plan)
    if is_loss and unclear:
        plan.unclear = unclear
    target = value if isinstance(value, MixedTarget) else value.as_subclass(MixedTarget)
    return _with_branches(target, results, plan, sample_ids, is_loss, unclear)


def _mixed(losses: Sequence[Tensor], plan: LossPlan) -> Tensor:
    """One loss of those of all branches."""
    if len(losses) == 1:
        return losses[0]
    value = torch.lerp(losses[1], losses[0], plan.lam)
    if type(value) is Tensor:
        value.__class__ = MixedTarget  # as_subclass would add a node to the graph
    return value


def _noted(loss: Tensor, plan: LossPlan) -> Tensor:
    """A loss that follows the plan, and counts as one if it has a graph."""
    with torch._C.DisableTorchFunctionSubclass():
        plan.losses += loss.requires_grad
    return loss


def _sample_ids(call: _Call, calls: Sequence[Call], results: Sequence[Tensor]) -> Tensor | None:
    moved = bool(call.args) and isinstance(call.args[0], MixedTarget) and moves(call.func)
    known = [(target.sample_ids, target.branches[0].ndim) for target in call.targets]
    return sample_ids_of(call.func, calls, results, known, moved, call.plan)


def _first_sample_ids(call: _Call) -> Tensor | None:
    return next((target.sample_ids for target in call.targets if target.sample_ids is not None), None)


def _with_mixed_predictions(call: dict[str, Any], plan: LossPlan, lam: float, partners: Tensor) -> dict[str, Any]:
    """The arguments of a loss, with the predictions for a sample mixed with those for its partner."""
    name, predictions = next(iter(call.items()))
    if not predictions.requires_grad or len(predictions) != len(partners):
        raise plan.refusal(
            f"the predictions, the first argument of a loss, need one entry per sample, got {tuple(predictions.shape)}"
            f" for {len(partners)} samples."
        )
    return {**call, name: torch.lerp(predictions[partners], predictions, lam)}


def _asks_for_divisors(call: _Call) -> bool:
    """Whether it matters by what the call divides its losses; each sample's loss notes that by itself."""
    return call.plan.divisors is not None and not call.plan.by_samples and call.unclear in ("", SUMMED)


def _undivided(call: _Call, given: Call, result: Any) -> str:
    """Why a result does not say by how many targets its losses are divided, which is noted; empty if it does."""
    divisors = cast(Divisors, call.plan.divisors)
    of_losses = [target.branches[0] for target in call.targets if target.is_loss]
    losses, numbers = [loss for loss in of_losses if loss.ndim], [loss for loss in of_losses if not loss.ndim]
    if losses and (why := divisors.compared(call.func)):
        return why
    if not isinstance(result, Tensor):
        return call.unclear
    if call.unclear == SUMMED and divides(call.func) and not (losses or result.ndim):
        return divisors.note_division([*given[0], *given[1].values()][1])
    if numbers and result.requires_grad and (why := divisors.unlike_parts(call.func, len(call.targets))):
        return why
    return divisors.note_reduction(call.func, losses[0], result) if losses else call.unclear


def _make_target(tensor: Tensor, call: _Call) -> None:
    """Make a target of a full tensor that one is written into: the user may go on with it, not with what is returned.

    Raises:
        MisconfigurationException: For a view, or a tensor of another class.
    """
    plan = call.plan
    if not isinstance(tensor, MixedTarget) and (type(tensor) is not Tensor or tensor._is_view()):
        raise plan.refusal(
            f"{call.func.__name__} would write from the target, which has two labels, into a part of a tensor, or into"
            f" a {type(tensor).__name__}: write into a full tensor, or make a new one."
        )
    plain = _branch(tensor, None).as_subclass(Tensor)
    # A scalar shows the mixed loss; any other tensor shows its first branch.
    copies = (plain.clone() for _ in call.targets[0].branches[1:])
    branches = (plain if plain.ndim else plain.clone(), *copies)
    known = [t.sample_ids for t in call.targets if t.sample_ids is not None and len(t.sample_ids) == len(plain)]
    by_sample = bool(known) and writes_by_sample(call.func, (plain, *call.args[1:]), call.kwargs)
    tensor.__class__ = MixedTarget
    _with_branches(cast(MixedTarget, tensor), branches, plan, known[0] if by_sample else None)


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


def _arguments(args: Sequence[Any], kwargs: dict[str, Any], number: int | None) -> Call:
    """The arguments of a function in the branch of this number, or in none."""
    return tuple([_branch(value, number) for value in args]), {key: _branch(kwargs[key], number) for key in kwargs}


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


def _is_of_losses(value: Any) -> bool:
    """Whether a value is a target with several losses."""
    return isinstance(value, MixedTarget) and value.is_loss and value.branches[0].ndim > 0


def _of_weights(args: Any, kwargs: dict[str, Any]) -> Call:
    """The arguments of a function with the weights of losses in place of the losses."""

    def weights(value: Any) -> Any:
        if not _is_of_losses(value):
            return _branch(value, 0)
        return torch.ones_like(value.branches[0]) if value.entry_weights is None else value.entry_weights.clone()

    return tuple(map(weights, args)), {name: weights(value) for name, value in kwargs.items()}
