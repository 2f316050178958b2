"""Parts of a batch that are left as they are where its samples are mixed, and that no loss may depend on unnoticed.

An identifier, a file's position or a value for the log stays what it is. A weight of the samples' losses, or features
that the network sees, must be mixed with the rest. Which of them a part is shows where a step computes with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.losses import is_loss
from lightning_tricks.core.mixed_targets.operations import differentiates, uses_metadata_only, writes


@dataclass(frozen=True)
class Unmixed:
    """What a part of a batch is called, and which uses of it are refused besides those in losses.

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

    A single number over all samples, such as a sum of weights, is the same for every order of the samples.
    """

    plan: LossPlan
    about: Unmixed

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the plain tensors, unless a loss would depend on them."""
        kwargs = kwargs or {}
        tensors = list(_tensors_in((*args, *kwargs.values())))
        parts = [tensor for tensor in tensors if isinstance(tensor, UnmixedPart)]
        part = max(parts, key=lambda part: part.about.in_network)
        if uses_metadata_only(func, args) or not part.plan.open:
            return func(*_plain(tuple(args)), **_plain(kwargs))
        others = [tensor for tensor in tensors if not isinstance(tensor, UnmixedPart)]
        target = next((tensor for tensor in others if _is_target(tensor, part.plan)), None)
        if differentiates(func) and target is not None:
            return type(target).__torch_function__(func, (type(target),), args, kwargs)
        _require_no_loss(func, part, others)
        if differentiates(func) or (writes(func) and isinstance(args[0], UnmixedPart)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = func(*_plain(tuple(args)), **_plain(kwargs))
        if target is not None:
            same = _moves_samples(func, args, part) or _is_constant(part)
            return result if same else _unclear(args[0] if writes(func) else result, part)
        into = args[0] if writes(func) and part.about.in_network else None
        if type(into) is Tensor and into.shape[:1] == (part.plan.samples,):
            into.__class__ = UnmixedPart  # the user goes on with what was written into
            into.plan, into.about = part.plan, part.about  # type: ignore[attr-defined]
        if writes(func) or getattr(func, "__self__", None) is Tensor._base:  # torch.compile asks for it
            return result
        return _marked(result, part)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)


def unmixed_part(tensor: Tensor, plan: LossPlan, about: Unmixed) -> UnmixedPart:
    """Make a tensor that refuses to become a part of the loss."""
    part = tensor.as_subclass(UnmixedPart)
    part.plan, part.about = plan, about
    return part


def _require_no_loss(func: Callable[..., Any], part: UnmixedPart, others: Sequence[Tensor]) -> None:
    """Raise where a part meets what the network makes, besides in a loss of the target.

    Raises:
        MisconfigurationException: If it does.
    """
    with torch._C.DisableTorchFunctionSubclass():
        traced = torch.is_grad_enabled() and any(other.requires_grad for other in others)
    about, of_target = part.about, any(_is_target(other, part.plan) for other in others)
    if not traced or (of_target and not writes(func)):
        return
    is_residual = func.__name__.strip("_") in ("sub", "rsub", "subtract") and any(t.shape == part.shape for t in others)
    in_loss = of_target or is_loss(func) or is_residual
    if not (in_loss or about.in_network) or _is_constant(part):  # which waits for a GPU, and so comes last
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


def _marked(result: Any, part: UnmixedPart) -> Any:
    if type(result) is Tensor:
        return unmixed_part(result, part.plan, part.about) if result.ndim and not result.requires_grad else result
    if isinstance(result, tuple | list) and any(isinstance(item, Tensor) for item in result):
        return type(result)([_marked(item, part) for item in result])
    return result
