"""The cross-entropy of a linear layer, a few rows at a time; apart from lean_loss, which replaces losses by it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BYTES = 2**23  # of the logits that exist at a time, unless the inputs have more


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    rows: int | None = None,
) -> Tensor:
    """``F.cross_entropy(hidden @ weight.T + bias, target)`` without all of the logits at once, in 32 bits.

    The logits of some rows are computed, and again in the backward pass, in the dtype of ``hidden``. Gradients are
    added up in 32 bits, and scaled as the loss is. torch's own ``linear_cross_entropy`` computes gradients in the
    forward pass, where the scale of a GradScaler does not reach them: in fp16 small ones are rounded to 0.

    Args:
        hidden: Inputs of the layer (N, H).
        weight: Weights of the layer (C, H).
        target: Class indices (N,), or probabilities (N, C).
        bias: Bias of the layer (C,).
        class_weight: Weights of the classes (C,).
        ignore_index: The class index that does not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of the uniform distribution in the targets, in [0, 1].
        rows: The rows at a time; by default those whose logits take 8 MiB, or as much as ``hidden``. If that is all of
            them, the logits are kept.

    Example:
        >>> hidden, weight, target = torch.randn(6, 4), torch.randn(10, 4), torch.arange(6)
        >>> loss = linear_cross_entropy(hidden, weight, target, rows=2)
        >>> torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, target))

    References:
        Wijmans et al., arXiv 2411.09009.
    """
    settings = {"weight": class_weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if len(hidden) != len(target):
        raise ValueError(f"target must have an entry for each of {len(hidden)} rows of logits, got {len(target)}.")
    rows = rows or max(1, max(BYTES, hidden.nbytes) // (4 * len(weight)))
    if len(hidden) <= rows:  # nothing to save
        return _losses(F.linear(hidden, weight, bias), target, {**settings, "reduction": reduction})
    losses: Tensor = _Rows.apply(hidden, weight, bias, target, settings, rows)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if target.is_floating_point():
        return losses.mean()
    counts = target != ignore_index
    return losses.sum() / (counts.sum() if class_weight is None else (class_weight[target * counts] * counts).sum())


class _Rows(torch.autograd.Function):
    """The losses (N,), and their gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: Any, rows: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.settings, ctx.rows = settings, rows
        parts = zip(hidden.split(rows), target.split(rows), strict=True)
        return torch.cat([_losses(F.linear(h, weight, bias), y, settings) for h, y in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # where there is a graph of the gradient, which that of the logits is not in
            raise RuntimeError(
                "The cross-entropy without logits has no second derivatives, got create_graph=True: leave LeanLoss"
                " (lean_loss) out where the loss or the optimizer needs them."
            )
        hidden, weight, bias, target = ctx.saved_tensors
        wanted = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad, strict=False))
        sums = {"weight": weight, "bias": bias}
        sums = {name: torch.zeros_like(sums[name], dtype=_wide(hidden.dtype)) for name in sums if wanted[name]}
        hiddens = []
        for h, y, g in zip(hidden.split(ctx.rows), target.split(ctx.rows), gradient.split(ctx.rows), strict=True):
            with torch.enable_grad():
                logits = F.linear(h, weight, bias).detach().requires_grad_()
                (d,) = torch.autograd.grad(_losses(logits, y, ctx.settings), logits, g)
            if wanted["hidden"]:
                hiddens.append(d @ weight)
            if "weight" in sums and d.dtype == sums["weight"].dtype:
                sums["weight"].addmm_(d.T, h)
            elif "weight" in sums:
                sums["weight"] += d.T @ h
            if "bias" in sums:
                sums["bias"] += d.sum(0)
        for name, value in (("weight", weight), ("bias", bias)):
            sums[name] = sums[name].to(value.dtype) if name in sums else None
        return torch.cat(hiddens) if hiddens else None, sums["weight"], sums["bias"], None, None, None


def _losses(logits: Tensor, target: Tensor, settings: dict[str, Any]) -> Tensor:
    return F.cross_entropy(logits.to(_wide(logits.dtype)), target, **{"reduction": "none", **settings})


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
