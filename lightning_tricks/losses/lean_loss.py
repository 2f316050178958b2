"""A head that hands on its inputs instead of its logits, of which the cross-entropy then takes a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.mixed_targets.target import MixedTarget
from lightning_tricks.losses.linear_cross_entropy import linear_cross_entropy

__all__ = ["lean_loss"]


def lean_loss(model: nn.Module) -> nn.Module:
    """Compute the training loss of a large vocabulary without its logits: ``F.cross_entropy`` in chunks, in place.

    While ``model`` trains, its head returns a stand-in for the logits, and the loss of the model or of the module
    around it, a cross-entropy, computes them a few rows at a time, and again in the backward pass. The loss is that of
    the model's own code: label shift, ``ignore_index``, label smoothing, class weights and ``num_items_in_batch``
    count as before. In eval mode and without gradients the logits are there; ``logits.detach()`` computes them.

    Args:
        model: A transformers model for causal or masked language modeling, or the nn.Linear that is the head.

    Returns:
        The same model. A copy or a pickle of it computes its logits as before.

    Raises:
        ValueError: If there is no head, or if it is no plain nn.Linear (with adapters, shards or another's wrapper).
        MisconfigurationException: In the forward pass, if the logits are changed before the loss (soft caps, scales),
            or if ZeRO-3 or FSDP2 has cut the head since.

    Example:
        >>> head = lean_loss(nn.Linear(16, 1000))
        >>> logits = head(torch.randn(8, 16))
        >>> F.cross_entropy(logits, torch.arange(8)).backward()
        >>> logits.shape, head.weight.grad.shape
        (torch.Size([8, 1000]), torch.Size([1000, 16]))

    References:
        Wijmans et al., arXiv 2411.09009.
    """
    head = head_of(model)
    wrap_method(head, "forward", Head(head))
    return model


def head_of(model: nn.Module) -> nn.Linear:
    """The head of a model: ``get_output_embeddings()``, or the model itself.

    Raises:
        ValueError: If there is none, or if it is no plain nn.Linear.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: model)()
    kind = type(head).__name__
    if not isinstance(head, nn.Module) or (head is model and not isinstance(head, nn.Linear)):
        raise ValueError(
            f"lean_loss needs a model with an output layer (get_output_embeddings()) or that nn.Linear itself, got"
            f" {type(model).__name__}."
        )
    another = type(head).forward is not nn.Linear.forward or "forward" in vars(head)
    if not isinstance(head, nn.Linear) or another:
        rest = "whose forward pass is another one" if isinstance(head, nn.Linear) else "which is no plain nn.Linear"
        raise ValueError(f"lean_loss needs logits that are hidden @ weight.T + bias; the head is a {kind}, {rest}.")
    if isinstance(head.weight, DTensor) or hasattr(head.weight, "ds_id") or type(head.weight.data) is not Tensor:
        raise ValueError(f"lean_loss needs the weights of the head in one plain tensor, got {type(head.weight.data)}.")
    return head


class Head:
    """The forward pass of a head, which returns ``Logits`` while it trains; can be pickled."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.losses = 0  # computed from its logits

    @torch.compiler.disable
    def __call__(self, forward: Callable[..., Any], input: Tensor) -> Tensor:  # as nn.Linear names it
        if not (self.head.training and torch.is_grad_enabled()):
            return forward(input)
        if hasattr(self.head.weight, "ds_id"):
            raise _cut("ZeRO-3")
        return Logits.of(self, input, self.head.weight, self.head.bias)


class _Blank(torch.autograd.Function):
    """A number that takes no memory and is none, should anything read it in a way that torch does not tell of."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.full((), torch.nan, dtype=dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise _needed("an autograd.Function")


def _needed(what: str) -> MisconfigurationException:
    return MisconfigurationException(
        "LeanLoss (lean_loss) computes F.cross_entropy(logits (N, C), target) without the logits, and they are needed"
        f" for {what}. For the loss of (B, T, C), flatten them, logits.flatten(0, 1); for a metric, take"
        " logits.detach(); with torch.compile, compile what is before the head; if the module or another trick changes"
        " logits or targets, leave LeanLoss out."
    )


def _cut(strategy: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"LeanLoss (lean_loss) needs the weights of the head in one piece until the loss is there, and {strategy} gives"
        " them to the forward pass of the head alone: take DDP, ZeRO-2 or one device, or leave it out."
    )


class Logits(Tensor):
    """Stands for ``hidden @ weight.T + bias`` (..., C), until a cross-entropy takes rows of it."""

    head: Head
    hidden: Tensor  # (..., H)
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(
        cls, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
    ) -> Logits:
        """Stand-in logits, of the dtype that a linear layer would give."""
        if torch.is_autocast_enabled(hidden.device.type):
            low = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, bias = _cast(hidden, low), _cast(weight, low), bias if bias is None else _cast(bias, low)
        blank = _Blank.apply(hidden, weight, dtype or hidden.dtype)
        made = blank.expand(*hidden.shape[:-1], len(weight)).as_subclass(cls)
        made.head, made.hidden, made.weight, made.bias = head, hidden, weight, bias
        return made

    def _with(self, hidden: Tensor, dtype: torch.dtype) -> Logits:
        with torch.autocast(hidden.device.type, enabled=False):
            return Logits.of(self.head, hidden, self.weight, self.bias, dtype)

    def _values(self) -> Tensor:
        with torch.autocast(self.hidden.device.type, enabled=False):
            return F.linear(self.hidden, self.weight, self.bias).to(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], Logits) else None
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if isinstance(target, MixedTarget) and target.plan.only_looks:  # which hands on the plain target
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            name = _name(func)
            # FSDP2 asks for the base of whatever leaves its modules.
            if name == "_base" and logits is not None and _is_under_fsdp2(logits.head.head):
                raise _cut("FSDP2")
            if name in _FACTS or name.startswith("new_"):
                return func(*args, **kwargs)
            if logits is not None and (kept := _kept(logits, name, func, args[1:], kwargs)) is not None:
                return kept
            if func is F.cross_entropy and logits is not None and (loss := _cross_entropy(*args, **kwargs)) is not None:
                return loss
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Logits)]
            writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            needs = torch.is_grad_enabled() and name not in _FREE and any(_needs_gradient(each) for each in given)
            if writes or needs:
                raise _needed(f"{name}({', '.join(type(each).__name__ for each in args)})")
            args, kwargs = tree_map_only(Logits, Logits._values, (args, kwargs))
        return func(*args, **kwargs)


_FACTS = (
    *("shape", "size", "dim", "ndim", "numel", "__len__"),
    *("dtype", "device", "layout", "is_cuda", "is_floating_point"),
)
_FREE = ("argmax", "__repr__")  # of gradients
_ROWS = ("view", "reshape", "flatten")


def _is_under_fsdp2(head: nn.Module) -> bool:
    from torch.distributed._composable_state import _module_state_mapping

    holders = [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]
    return any(part is head for holder in holders for part in holder.modules())


def _cast(x: Tensor, low: torch.dtype) -> Tensor:
    """What autocast makes of a tensor: those in double precision stay as they are."""
    return x if x.dtype == torch.float64 else x.to(low)


def _name(func: Any) -> str:
    """The name of a function, a method or a property."""
    name = getattr(func, "__name__", type(func).__name__)
    return func.__self__.__name__ if name == "__get__" else name


def _needs_gradient(logits: Logits) -> bool:
    return any(each is not None and each.requires_grad for each in (logits.hidden, logits.weight, logits.bias))


def _kept(logits: Logits, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that leaves each row as it is makes of the logits; None for another one."""
    hidden, dtype = logits.hidden, logits.dtype
    if name == "requires_grad":
        return _needs_gradient(logits)
    if name == "detach":
        made = logits._with(hidden.detach(), dtype)
        made.weight, made.bias = logits.weight.detach(), None if logits.bias is None else logits.bias.detach()
        return made
    if name in ("contiguous", "float"):
        return logits._with(hidden, torch.float32 if name == "float" else dtype)
    if name == "to":
        given = [*args, *kwargs.values()]
        moved = [each for each in given if isinstance(each, str | torch.device) and torch.device(each) != logits.device]
        dtypes = [each for each in given if isinstance(each, torch.dtype)]
        return None if moved else logits._with(hidden, dtypes[0] if dtypes else dtype)
    if name in _ROWS:
        shape = func(torch.empty((), device="meta").expand(logits.shape), *args, **kwargs).shape
        return logits._with(hidden.reshape(*shape[:-1], -1), dtype) if shape[-1] == logits.shape[-1] else None
    if name == "__getitem__":
        # Samples and tokens may be left out, but not classes: the loss of a row needs all of its logits.
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        whole = isinstance(index[-1], slice) and index[-1] == slice(None)
        taken = sum(each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 1 for each in index)
        if whole or (taken < logits.ndim and not any(each is Ellipsis or each is None for each in index)):
            return logits._with(hidden[index], dtype)
    return None


def _cross_entropy(
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The loss, with the arguments of F.cross_entropy; None for what the chunks do not have."""
    if logits.ndim != 2 or type(target) is not Tensor or size_average is not None or reduce is not None:
        return None
    logits.head.losses += 1
    with torch.autocast(logits.device.type, enabled=False):
        loss = linear_cross_entropy(
            logits.hidden,
            logits.weight,
            target,
            logits.bias,
            class_weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    return loss.to(torch.promote_types(loss.dtype, logits.dtype))
