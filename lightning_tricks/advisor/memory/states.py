"""The memory of optimizers: bytes of their states, and of temporary tensors in a step."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
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
from lightning_tricks.optimizers.table import row_of

OptimizerLike = str | Optimizer | Callable[[Any], Optimizer]

# Names for optimizers with settings, besides those of ``optimizer()``.
SETTINGS: dict[str, Callable[..., Optimizer]] = {
    "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
}


@dataclass(frozen=True)
class States:
    """The bytes of an optimizer for a set of parameters: its states, and the peak of temporary tensors in a step."""

    persistent: int
    temporary: int

    def scaled(self, fraction: float) -> States:
        """Those of a fraction of the parameters."""
        return States(round(self.persistent * fraction), round(self.temporary * fraction))


def states_of(optimizer: OptimizerLike, weights: list[Weight], dtype: torch.dtype | None, *, foreach: bool) -> States:
    """Count the bytes of an optimizer.

    For a name of ``optimizers()`` outside of torch they are those of its row. Other optimizers step on fake tensors,
    and the bytes of their storages are counted.

    Args:
        optimizer: A name, an optimizer (which stays unchanged), its class, or a function from parameters to it.
        weights: The trainable parameters.
        dtype: The dtype in which the optimizer sees floating-point parameters; None if they keep their own.
        foreach: Whether torch's optimizers step on many parameters at a time, as on CUDA.
    """
    if isinstance(optimizer, str):
        row = None if optimizer in SETTINGS else row_of(optimizer)
        if row is not None and (row.library != "torch" or row.is_lookahead or row.by_shape):
            sizes = [4 * weight.numel if row.is_quantized else weight.bytes(dtype) for weight in weights]
            return States(round(row.bytes * sum(sizes) / 4), 0)
        optimizer = SETTINGS[optimizer] if row is None else row.load()
    if not weights:
        return States(0, 0)
    with fake_mode(), LiveBytes() as live:
        tensors = [
            torch.empty(w.shape, dtype=dtype if dtype and w.dtype.is_floating_point else w.dtype) for w in weights
        ]
        parameters = [nn.Parameter(tensor) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        before = live.now
        copied = _copy(optimizer, parameters)
        for group in copied.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = foreach
        # A scheduler may have replaced the bound method `copied.step` by one that steps the original optimizer.
        type(copied).step(copied)
        live.peak = after = live.now
        type(copied).step(copied)  # The first step has made the states; the peak is that of the second.
        return States(persistent=after - before, temporary=live.peak - after)


def _copy(optimizer: OptimizerLike, parameters: list[nn.Parameter]) -> Optimizer:
    """Copy an optimizer, or make one, with other parameters."""
    if isinstance(optimizer, Optimizer):
        if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} steps another optimizer inside, which stays out of a copy: pass"
                " its name, such as 'lookahead_adamw'."
            )
        copied = copy.copy(optimizer)
        for name, value in vars(optimizer).items():
            vars(copied).setdefault(name, value)  # torch copies its own attributes only
        trained = [old for group in optimizer.param_groups for old in group["params"] if old.requires_grad]
        if sum((Counter(old.shape for old in trained) - Counter(new.shape for new in parameters)).values()):
            raise ValueError(
                f"optimizer has {len(trained)} parameters that are not all among the {len(parameters)} that the model"
                " trains: pass the model's own."
            )
        by_shape = defaultdict(list)
        for new in parameters:
            by_shape[new.shape].append(new)
        pairs = {old: by_shape[old.shape].pop() for old in trained}
        copied.param_groups = [
            {**group, "params": [pairs[old] for old in group["params"] if old in pairs]}
            for group in optimizer.param_groups
        ]
        copied.state = defaultdict(dict)
        for old, state in optimizer.state.items():  # Adagrad makes its states at construction.
            if old in pairs:
                copied.state[pairs[old]] = tree_map_only(Tensor, partial(torch.empty_like, device="cpu"), state)
        return copied
    if not callable(optimizer):
        raise TypeError(f"optimizer must be a name, a torch optimizer, its class or a function, got {optimizer!r}.")
    rate = inspect.signature(optimizer).parameters.get("lr")
    needed = {"lr": 0.1} if rate is not None and rate.default is rate.empty else {}
    made = optimizer(parameters, **needed)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer must make a torch optimizer, got {type(made).__name__}.")
    return made
