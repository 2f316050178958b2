"""Parts of a batch that are left as they are where its samples are mixed, and that no loss may depend on unnoticed.

An identifier, a file's position or a value for the log stays what it is. A weight of the samples' losses, a second
label, or features that the network sees, must be mixed with the rest. Which of them a part is shows where a step
computes with it.

Integers that the network sees (categories, lengths, attention masks) cannot be mixed, and stay those of the sample
itself. As labels, they are the target of a loss, or choose among the numbers that the network has made. What they
choose is followed: it is a prediction if a layer or the target meets it, and a loss of its own if none does.

A refusal of every such part at the first batch, by its path, would be shorter than a class of Tensor, but would refuse
what is right: DeepAR and TemporalFusionTransformer, SCANVI and chemprop's networks have lengths, histories, batches of
cells or weights beside the inputs and targets of their batches, and train with Mixup in docs/clients.md as by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.operations import (
    Kind,
    is_elementwise,
    is_layer,
    is_loss,
    kind_of,
    leaves_samples_out,
    makes_codes,
    moves,
    multiplies,
    named,
    picks_numbers,
    sums_by_labels,
    weighs_samples,
)


@dataclass(frozen=True)
class Unmixed:
    """Names an unmixed part of the batch, and says where its use is refused besides in losses.

    Args:
        trick: The name of the trick that mixes the rest.
        path: The path of the part as Python code.
        name: The part as ``inputs`` or ``target`` would name it.
        inputs: The names of what is mixed.
        targets: The names of the targets.
        in_network: Whether the network must not see it; a user who names the inputs has left it out.
    """

    trick: str
    path: str
    name: str
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    in_network: bool


class UnmixedPart(torch.Tensor):
    """A tensor of a batch that is not mixed; so is what is computed from it alone, except for single numbers.

    A single number over all samples, such as a sum of weights, is the same for every order of the samples. With a
    graph, it is what a part has chosen among the numbers that the network has made.
    """

    plan: LossPlan
    about: Unmixed
    is_code: bool  # whether it is made of integers as codes of labels are

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the plain tensors, unless a loss would depend on them."""
        func, kwargs = named(func), kwargs or {}
        use = _use(func, args, kwargs)
        if use is None or use.kind is Kind.FORM:
            return func(*_plain(tuple(args)), **_plain(kwargs))
        if use.kind is Kind.GRAPH and use.target is not None:
            return type(use.target).__torch_function__(func, (type(use.target),), args, kwargs)
        _require_no_loss(use)
        if use.kind is Kind.GRAPH or (use.kind is Kind.WRITE and isinstance(args[0], UnmixedPart)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = func(*_plain(tuple(args)), **_plain(kwargs))
        if use.target is not None:
            into = args[0] if use.kind is Kind.WRITE else result
            return result if _goes_together(use) else _unclear(into, use.part)
        with torch._C.DisableTorchFunctionSubclass():  # the parts are asked what they are
            is_chosen, is_code = _is_chosen(use, result), _is_code(use)
        if use.kind is Kind.WRITE:
            _mark_written(args[0], use.part, is_chosen, is_code)
            return result
        if getattr(func, "__self__", None) is Tensor._base:  # torch.compile asks for it
            return result
        return _marked(result, use.part, is_chosen, is_code, moves(func))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)


def unmixed_part(tensor: Tensor, plan: LossPlan, about: Unmixed) -> UnmixedPart:
    """Make a tensor that refuses to become a part of the loss."""
    return _set(tensor.as_subclass(UnmixedPart), plan, about, is_code=False)


def require_no_part(loss: Any) -> None:
    """Raise for a loss that a training step returns, if a part has chosen it.

    Raises:
        MisconfigurationException: For such a loss.
    """
    if isinstance(loss, UnmixedPart) and loss.plan.open:
        raise loss.plan.unclear_loss(_goes_with_the_target(loss.about))


@dataclass
class _Use:
    """A call of a function with parts of a batch among its arguments.

    Args:
        func: The function.
        kind: What it does.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        given: The parts that have no graph.
        chosen: What parts have chosen among the numbers of the network.
        others: The other tensors.
        traced: Those among them that have a graph.
    """

    func: Callable[..., Any]
    kind: Kind
    args: Sequence[Any]
    kwargs: dict[str, Any]
    given: list[UnmixedPart]
    chosen: list[UnmixedPart]
    others: list[Tensor]
    traced: list[Tensor]

    @property
    def arguments(self) -> Sequence[Any]:
        """All arguments, with that which the function is called on as the first one."""
        named = dict(self.kwargs)
        return [*([named.pop("input")] if "input" in named else []), *self.args, *named.values()]

    @property
    def part(self) -> UnmixedPart:
        """The part that an error names."""
        return max(self.given or self.chosen, key=lambda part: part.about.in_network)

    @property
    def target(self) -> Any:
        """A target, or what was computed from one; None if there is none."""
        return next((tensor for tensor in self.others if _is_target(tensor, self.part.plan)), None)


def _use(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> _Use | None:
    """A call of a function; None if the batch of its parts is done."""
    tensors = list(_tensors_in((*args, *kwargs.values())))
    parts = [tensor for tensor in tensors if isinstance(tensor, UnmixedPart) and tensor.plan.open]
    others = [tensor for tensor in tensors if not isinstance(tensor, UnmixedPart)]
    with torch._C.DisableTorchFunctionSubclass():
        chosen = [part for part in parts if part.requires_grad]
        given = [part for part in parts if not part.requires_grad]
        traced = [tensor for tensor in others if tensor.requires_grad] if torch.is_grad_enabled() else []
    return _Use(func, kind_of(func, args), args, kwargs, given, chosen, others, traced) if parts else None


def _require_no_loss(use: _Use) -> None:
    """Raise where a part meets what the network makes, besides in a loss of the target.

    Raises:
        MisconfigurationException: If the part meets it.
    """
    func, part, about = use.func, use.part, use.part.about
    writes = use.kind is Kind.WRITE
    if not use.given:
        if func.__name__ == "backward" or (use.target is not None and writes and use.args[0] is part):
            raise part.plan.refusal(_goes_with_the_target(about))
        return
    of_target = use.target is not None
    if not (use.traced or use.chosen) or (of_target and not writes):
        return
    made = [*use.others, *use.chosen]
    is_residual = func.__name__.strip("_") in ("sub", "rsub", "subtract") and any(t.shape == part.shape for t in made)
    in_loss = of_target or is_loss(func) or is_residual
    if not (in_loss or about.in_network) or _is_constant(part):  # checked last because it waits for the GPU
        return
    if in_loss:
        raise part.plan.refusal(_goes_with_the_target(about))
    inputs = ", ".join(map(repr, about.inputs))
    raise part.plan.refusal(
        f"the loss depends on {about.path}, which is not mixed. If the network sees it, name it with the inputs,"
        f" inputs=[{inputs}, {about.name!r}], or name only them, inputs=[{inputs}], to leave it as it is. If it is"
        f" a weight of samples or a label, name it as a target, too, target=[{', '.join(map(repr, about.targets))},"
        f" {about.name!r}]."
    )


def _goes_with_the_target(about: Unmixed) -> str:
    return (
        f"a loss is computed from {about.path}, which is not mixed as the target is. Name it as a target, too,"
        f" target=[{', '.join(map(repr, about.targets))}, {about.name!r}]: a weight of samples, a mask or a second"
        " label then goes with its sample."
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, UnmixedPart) and not value.is_floating_point() and value.dtype != torch.bool


def _is_code(use: _Use) -> bool:
    """Whether a result is made of integers as codes of labels are, or of what they have chosen."""
    if use.chosen or any(part.is_code for part in use.given):
        return True
    tensors = [*use.given, *use.others]
    return any(map(_is_integer, use.given)) and makes_codes(use.func, use.arguments, tensors, _is_integer)


def _is_chosen(use: _Use, result: Any) -> bool:
    """Whether a result is what parts have chosen, as labels do, among the numbers that the network has made."""
    func, samples = use.func, use.part.plan.samples
    if use.chosen:
        return not is_layer(func, use.traced)
    made = [tensor for tensor in use.traced if not tensor.is_leaf]  # a category looks up a weight
    if not made:
        return False
    if any(part.is_code for part in use.given) and (is_elementwise(func) or moves(func) or multiplies(func)):
        return True
    if all(part.numel() == samples for part in use.given):
        are_masks = all(part.dtype == torch.bool for part in use.given)
        if weighs_samples(func, result, samples) or (are_masks and leaves_samples_out(func, use.arguments, samples)):
            return True
    if sums_by_labels(func, use.arguments, samples, _is_integer):
        return True
    of_network = any(use.arguments[0] is tensor for tensor in made)
    return of_network and picks_numbers(func, use.arguments, samples, _is_integer)


def _goes_together(use: _Use) -> bool:
    """Whether a result of the target may be a part of the loss."""
    if use.given:
        return _moves_samples(use.func, use.args, use.part) or _is_constant(use.part)
    return not use.target.is_loss  # a prediction, and the label that it is compared with


def _is_target(tensor: Tensor, plan: LossPlan) -> bool:
    """Whether a tensor is a target, or was computed from one."""
    return "branches" in vars(tensor) and vars(tensor)["plan"] is plan


def _moves_samples(func: Callable[..., Any], args: Sequence[Any], part: UnmixedPart) -> bool:
    """Whether a function takes the samples in another order, such as that of their lengths."""
    alone = func.__name__ == "__getitem__" and args[1] is part and part.dtype != torch.bool
    return alone and tuple(part.shape) == (part.plan.samples,)


def _is_constant(part: UnmixedPart) -> bool:
    """Whether all weights are equal, so that none need be mixed; a mask may differ in the next batch."""
    entries = _plain(part).detach().flatten()
    return entries.is_floating_point() and bool((entries == entries[:1]).all())


def _unclear(result: Any, part: UnmixedPart) -> Any:
    """The result for the target, of which a loss is refused; it may only be logged."""
    for tensor in _tensors_in([result]):
        if _is_target(tensor, part.plan):
            tensor.unclear = tensor.unclear or _goes_with_the_target(part.about)  # type: ignore[attr-defined]
    return result


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())


def _plain(value: Any) -> Any:
    if isinstance(value, UnmixedPart):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return value


def _set(tensor: Any, plan: LossPlan, about: Unmixed, is_code: bool) -> Any:
    tensor.plan, tensor.about, tensor.is_code = plan, about, is_code
    return tensor


def _marked(result: Any, part: UnmixedPart, is_chosen: bool, is_code: bool, is_moved: bool) -> Any:
    """The result of a function, as a part; one with a graph only if it has been chosen."""
    if type(result) is Tensor and result.requires_grad and is_chosen:
        result.__class__ = UnmixedPart  # as_subclass would add a node to the graph
        return _set(result, part.plan, part.about, is_code)
    # A number of one sample has been moved, and is not computed from all of them.
    if type(result) is Tensor and not result.requires_grad and (result.ndim or is_moved):
        return _set(result.as_subclass(UnmixedPart), part.plan, part.about, is_code)
    if isinstance(result, tuple | list) and any(isinstance(item, Tensor) for item in result):
        return type(result)([_marked(item, part, is_chosen, is_code, is_moved) for item in result])
    return result


def _mark_written(into: Any, part: UnmixedPart, is_chosen: bool, is_code: bool) -> None:
    """Make a tensor that a part was written into a part as well: the user goes on with it."""
    if type(into) is not Tensor:
        return
    is_alike = not (part.is_floating_point() or into.is_floating_point()) or (is_code and into.ndim > 1)
    of_samples = into.shape[:1] == (part.plan.samples,)
    if is_chosen or (of_samples and (part.about.in_network or is_alike)):
        into.__class__ = UnmixedPart
        _set(into, part.plan, part.about, is_code)
