"""SAM as a plain loop: no Lightning, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def naive_sam(
    module: Any,
    windows: Sequence[Sequence[Any]],
    *,
    rho: float,
    accumulate: int,
    clip: tuple[str, float] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Train ``module`` in place: one optimizer step a window of micro-batches, each with its own perturbation."""
    optimizer = module.configure_optimizers()
    module.train()
    for window in windows:
        optimizer.zero_grad()
        for batch in window:
            gradients = torch.autograd.grad(_loss(module, batch, dtype), list(module.parameters()))
            norm = torch.sqrt(sum((g**2).sum() for g in gradients))
            old = [p.detach().clone() for p in module.parameters()]
            buffers = [b.clone() for b in module.buffers()]
            with torch.no_grad():
                for p, g in zip(module.parameters(), gradients, strict=True):
                    p += rho * g / norm
            (_loss(module, batch, dtype) / accumulate).backward()
            with torch.no_grad():
                for p, o in zip(module.parameters(), old, strict=True):
                    p.copy_(o)
                for b, o in zip(module.buffers(), buffers, strict=True):
                    b.copy_(o)
        if clip and clip[0] == "norm":
            nn.utils.clip_grad_norm_(module.parameters(), clip[1])
        elif clip:
            nn.utils.clip_grad_value_(module.parameters(), clip[1])
        optimizer.step()


def _loss(module: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype | None) -> Tensor:
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
        return nn.functional.cross_entropy(module(batch[0]), batch[1])
