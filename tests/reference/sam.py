"""SAM as plain loops: no Lightning, one micro-batch at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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
    scale: float = 1.0,
    eta: float | None = None,
    every: int = 1,
    micro: int | None = None,
    only: str = "",
) -> list[float]:
    """Train ``module`` in place: one optimizer step a window of batches, each (part) with its own perturbation.

    Gives the norm of the gradient of each perturbed batch, by which the perturbation is divided; of parts their mean.
    """
    optimizer, norms = module.configure_optimizers(), []
    module.train()
    for number, window in enumerate(windows):
        optimizer.zero_grad()
        perturbed = number % every == 0
        for x, y in window:
            with torch.no_grad():
                _loss(module, (x, y), dtype)  # the one run that buffers see
            buffers, norm = [b.clone() for b in module.buffers()], 0.0
            size = micro if micro and perturbed else len(y)
            for part in zip(x.split(size), y.split(size), strict=True):
                old, share = [p.detach().clone() for p in module.parameters()], len(part[1]) / len(y)
                if perturbed:
                    chosen = {name: p for name, p in module.named_parameters() if re.search(only, name)}
                    gradients = torch.autograd.grad(_loss(module, part, dtype) * scale, list(chosen.values()))
                    norm += share * naive_perturb(chosen, [g / scale for g in gradients], rho, eta)
                (_loss(module, part, dtype) * share / accumulate * scale).backward()
                _write(module.parameters(), old)
            _write(module.buffers(), buffers)
            norms += [norm] if perturbed else []
        _step(optimizer, list(module.parameters()), clip, scale)
    return norms


def naive_perturb(weights: dict[str, Tensor], gradients: Sequence[Tensor], rho: float, eta: float | None) -> float:
    """``w += rho * T**2 g / ||T g||`` with ``T = |w| + eta`` on names with "weight", else 1; all 1 without ``eta``."""
    adapts = [eta is not None and "weight" in name for name in weights]
    sizes = [w.abs() + eta if a else torch.ones_like(w) for w, a in zip(weights.values(), adapts, strict=True)]
    norm = torch.sqrt(sum(((t * g) ** 2).sum() for t, g in zip(sizes, gradients, strict=True)))
    with torch.no_grad():
        for w, t, g in zip(weights.values(), sizes, gradients, strict=True):
            w += rho * t**2 * g / norm
    return norm.item()


def naive_gan(
    module: Any,
    windows: Sequence[Sequence[Tensor]],
    losses: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
    *,
    rho: float,
) -> None:
    """Train in place: the discriminator plainly, then the generator by SAM; one step each a window of batches."""
    optimizers = module.configure_optimizers()
    owned = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    for window in windows:
        for optimizer, params, loss, sharp in zip(optimizers, owned, losses, (False, True), strict=True):
            total = [torch.zeros_like(p) for p in params]
            for x in window:
                old = [p.detach().clone() for p in params]
                if sharp:
                    gradients = torch.autograd.grad(loss(x), params)
                    naive_perturb(dict(zip(map(str, range(9)), params, strict=False)), gradients, rho, None)
                for t, g in zip(total, torch.autograd.grad(loss(x) / len(window), params), strict=True):
                    t += g
                _write(params, old)
            for p, t in zip(params, total, strict=True):
                p.grad = t
            optimizer.step()


def _step(optimizer: torch.optim.Optimizer, params: list[Tensor], clip: tuple[str, float] | None, scale: float) -> None:
    for p in params:
        p.grad /= scale
    if clip and clip[0] == "norm":
        nn.utils.clip_grad_norm_(params, clip[1])
    elif clip:
        nn.utils.clip_grad_value_(params, clip[1])
    optimizer.step()


def _loss(module: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype | None) -> Tensor:
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
        return nn.functional.cross_entropy(module(batch[0]), batch[1])


@torch.no_grad()
def _write(targets: Iterable[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
