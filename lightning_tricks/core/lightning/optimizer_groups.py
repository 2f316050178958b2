"""The settings that parameter groups were created with, before any scheduler changed them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Made = list[tuple[dict[str, Any], dict[str, Any]]]  # groups, and copies of what they were made with

# What torch's schedulers add to groups, and timm's too.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}


@contextmanager
def recorded_groups() -> Iterator[Made]:
    """Record the groups that optimizers are made with.

    Example:
        >>> import torch
        >>> with recorded_groups() as made:
        ...     optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
        ...     schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
        >>> restore_groups(made)
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """
    made: Made = []
    # The class, and not an optimizer as wrap_method would: the constructor of any optimizer makes its groups by this
    # method, before there is an instance to wrap, and the scheduler may overwrite them before one is returned.
    original = Optimizer.add_param_group

    def recording(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
        original(optimizer, param_group)
        group = optimizer.param_groups[-1]
        made.append((group, {name: deepcopy(value) for name, value in group.items() if name != "params"}))

    Optimizer.add_param_group = recording  # type: ignore[assignment, method-assign]
    try:
        yield made
    finally:
        Optimizer.add_param_group = original  # type: ignore[method-assign]


def restore_groups(made: Made) -> None:
    """Give the groups the settings back that they were made with, and leave those that an optimizer has added since."""
    for group, settings in made:
        for name in _OF_SCHEDULERS - settings.keys():
            group.pop(name, None)
        for name, value in settings.items():
            if isinstance(group.get(name), Tensor):  # a learning rate that a compiled step reads
                group[name].fill_(value)
            else:
                group[name] = deepcopy(value)


def weights_of(optimizer: Optimizer) -> list[Any]:
    """The weights in all groups of an optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Whether an optimizer averages weights itself, between ``train()`` and ``eval()``."""
    groups = optimizer.param_groups
    return bool(groups) and all("train_mode" in group for group in groups)
