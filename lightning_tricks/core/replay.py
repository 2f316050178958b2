"""Running a step again: the same random numbers, and a module's state as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

RandomState = dict[str, Any]


def random_state(device: torch.device) -> RandomState:
    """The state of the generators that a step on ``device`` may draw from: torch, the device, Python, NumPy."""
    state: RandomState = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    return state


def _set_random_state(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


@contextmanager
def random_numbers_of(state: RandomState, device: torch.device) -> Iterator[None]:
    """Draw from ``state`` inside the block; the generators go on afterwards as if it had not run."""
    outside = random_state(device)
    _set_random_state(state, device)
    try:
        yield
    finally:
        _set_random_state(outside, device)


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Leave every buffer and every torchmetrics state of ``module`` as it was before the block, bit for bit."""
    owners = [
        (owner, name, buffer) for owner in module.modules() for name, buffer in owner.named_buffers(recurse=False)
    ]
    values = [buffer.clone() for *_, buffer in owners]
    metrics = [(metric, _metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)]
    try:
        yield
    finally:
        with torch.no_grad():
            for (owner, name, buffer), value in zip(owners, values, strict=True):
                setattr(owner, name, buffer if _is_expanded(buffer) else buffer.copy_(value))
        for metric, state in metrics:
            metric.__dict__.update(state)


def _is_expanded(buffer: Tensor) -> bool:
    """Whether elements share memory; torch lets nobody write into such a tensor."""
    return any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _metric_state(metric: Metric) -> dict[str, Any]:
    """Copies of the accumulated values (``metric_state``) and of the bookkeeping that an update changes."""
    values = {name: list(v) if isinstance(v, list) else v.clone() for name, v in metric.metric_state.items()}
    return values | {name: metric.__dict__[name] for name in ("_update_count", "_computed", "_forward_cache")}
