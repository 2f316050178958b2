"""What optimizers hold: bytes of their states, and of what comes and goes in a step."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_tricks.advisor.memory.fake import LiveBytes, fake_mode
from lightning_tricks.advisor.memory.parameters import Weight
from lightning_tricks.core.checks import check_choice

OptimizerLike = str | Optimizer | Callable[[Any], Optimizer]

TORCH: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
}
# Bytes for each trained parameter, of optimizers that live elsewhere or depend on the shapes.
TABLE = {
    "lion": 4.0,
    "muon": 4.0,
    "madgrad": 12.0,
    "ranger21": 20.0,
    "adafactor": 0.02,
    "adamw_8bit": 2.04,
    "adamw_4bit": 1.06,
    "lion_8bit": 1.02,
}


@dataclass(frozen=True)
class States:
    """Bytes of an optimizer for one set of parameters."""

    held: int  # between steps
    passing: int  # made and freed within a step


def states_of(optimizer: OptimizerLike, weights: list[Weight], dtype: torch.dtype | None, *, foreach: bool) -> States:
    """The bytes that an optimizer holds for ``weights``, and those that come and go while it steps.

    A name is looked up; of what torch can build a step is made on tensors without memory, and its storages are counted.

    Args:
        optimizer: A name, an optimizer (which is not touched), its class, or a function from parameters to it.
        weights: The parameters that are trained.
        dtype: The floating-point type that they are held in for it; None: their own.
        foreach: Whether it steps on many parameters at a time, as torch's do on CUDA.
    """
    if isinstance(optimizer, str):
        check_choice("optimizer", optimizer, sorted([*TORCH, *TABLE]))
        if optimizer in TABLE:
            return States(round(TABLE[optimizer] * sum(weight.numel for weight in weights)), 0)
        optimizer = TORCH[optimizer]
    if not weights:
        return States(0, 0)
    with fake_mode(), LiveBytes() as live:
        made = [torch.empty(w.shape, dtype=dtype if dtype and w.dtype.is_floating_point else w.dtype) for w in weights]
        parameters = [nn.Parameter(each) for each in made]
        for each in parameters:
            each.grad = torch.empty_like(each)
        before = live.now
        copied = _copy(optimizer, parameters)
        for group in copied.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = foreach
        type(copied).step(copied)  # not the bound one, which a scheduler may have wrapped for the original
        live.peak = after = live.now
        type(copied).step(copied)  # the first one made the states
        return States(after - before, live.peak - after)


def _copy(optimizer: OptimizerLike, parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer like it over other parameters."""
    if isinstance(optimizer, Optimizer):
        copied, left = copy.copy(optimizer), iter(parameters)
        count = sum(old.requires_grad for group in optimizer.param_groups for old in group["params"])
        if count > len(parameters):
            raise ValueError(
                f"optimizer has {count} parameters, the model trains {len(parameters)}: pass the model's own."
            )
        pairs = {old: next(left) for group in optimizer.param_groups for old in group["params"] if old.requires_grad}
        copied.param_groups = [
            {**group, "params": [pairs[old] for old in group["params"] if old in pairs]}
            for group in optimizer.param_groups
        ]
        copied.state = defaultdict(dict)
        for old, state in optimizer.state.items():  # Adagrad's is there from the beginning
            if old in pairs:
                copied.state[pairs[old]] = tree_map_only(Tensor, partial(torch.empty_like, device="cpu"), state)
        return copied
    if not callable(optimizer):
        raise TypeError(f"optimizer must be a name, a torch optimizer or what makes one, got {optimizer!r}.")
    rate = inspect.signature(optimizer).parameters.get("lr")
    needed = {"lr": 0.1} if rate is not None and rate.default is rate.empty else {}
    made = optimizer(parameters, **needed)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer must make a torch optimizer, got {type(made).__name__}.")
    return made
