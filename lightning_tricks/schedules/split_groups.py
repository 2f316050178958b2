"""Parameter groups of an optimizer that is there already, split with the schedules that follow them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from itertools import compress
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_tricks.schedules.plateau import PlateauLR
from lightning_tricks.schedules.scheduler import CurveLR, set_lr

Part = tuple[Collection[Tensor], float]
_SCALED = ("base_lrs", "max_lrs", "_last_lr")  # torch's schedulers have a list with an item for each group
_COPIED = ("lr_lambdas", "min_lrs", "base_momentums", "max_momentums")


def split_groups(optimizer: Optimizer, schedulers: Iterable[Any], parts: Sequence[Part]) -> None:
    """Give each part its own parameter groups, with the settings of the groups it was in and a multiple of their rate.

    The schedulers go on with the rates of all groups. New groups come last, in the order of the parts and, within a
    part, of the groups that they are taken from.

    Args:
        optimizer: The optimizer, which is changed in place.
        schedulers: The schedulers of the optimizer, of torch or of this package.
        parts: Pairs of parameters and the factor of their learning rate. A parameter in no pair keeps its group.

    Raises:
        TypeError: For a scheduler of another kind, which may keep learning rates where nobody finds them, and for
            LBFGS, which has one group.

    Example:
        >>> import torch
        >>> stem, head = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([stem, head], lr=0.5)
        >>> split_groups(optimizer, [], [([stem], 0.1)])
        >>> [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        [(1, 0.5), (1, 0.05)]
    """
    schedulers = list(schedulers)
    if isinstance(optimizer, LBFGS):
        raise TypeError("LBFGS has one parameter group: use another optimizer, or leave the factor at 1.0.")
    for scheduler in schedulers:
        _require_known(scheduler)
    count = len(optimizer.param_groups)
    origins = [(place, 1.0) for place in range(count)]  # for each group the place it comes from, and its factor
    for number, (parameters, factor) in enumerate(parts, 1):
        wanted = {id(parameter) for parameter in parameters}
        for place, group in enumerate(optimizer.param_groups[:count]):
            taken = [id(parameter) in wanted for parameter in group["params"]]
            if all(taken):
                _scale(group, factor)
                origins[place] = (place, factor)
            elif any(taken):
                _move(optimizer, group, taken, number)
                _scale(optimizer.param_groups[-1], factor)
                origins.append((place, factor))
    for scheduler in schedulers:
        _follow(scheduler, origins)


def _move(optimizer: Optimizer, group: dict[str, Any], taken: list[bool], number: int) -> None:
    """Move the parameters that are taken from a group into a new group of the optimizer."""
    settings = {name: deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
    if settings.get("name"):
        settings["name"] += f"_{number}"  # LearningRateMonitor refuses doubles
    new: list[Any] = list(compress(group["params"], taken))
    left = [not is_taken for is_taken in taken]
    group["params"] = list(compress(group["params"], left))
    if "param_names" in group:
        new = list(zip(compress(group["param_names"], taken), new, strict=True))
        group["param_names"] = list(compress(group["param_names"], left))
    optimizer.add_param_group({**settings, "params": new})


def _scale(group: dict[str, Any], factor: float) -> None:
    set_lr(group, group["lr"] * factor)
    for name in ("initial_lr", "max_lr", "min_lr"):  # OneCycleLR keeps a min_lr
        if name in group:
            group[name] = group[name] * factor


def _require_known(scheduler: Any) -> None:
    if isinstance(scheduler, CurveLR | PlateauLR) or type(scheduler).__module__ == "torch.optim.lr_scheduler":
        for inner in getattr(scheduler, "_schedulers", []):  # SequentialLR and ChainedScheduler hold others
            _require_known(inner)
        return
    raise TypeError(
        "Parameter groups with learning rates of their own need a scheduler of torch.optim.lr_scheduler or of"
        f" lightning_tricks, got {type(scheduler).__name__}: use one of those, or leave the factor at 1.0."
    )


def _follow(scheduler: Any, origins: list[tuple[int, float]]) -> None:
    for inner in getattr(scheduler, "_schedulers", []):
        _follow(inner, origins)
    for name in _SCALED:
        if hasattr(scheduler, name):
            setattr(scheduler, name, [getattr(scheduler, name)[place] * factor for place, factor in origins])
    for name in _COPIED:
        if hasattr(scheduler, name):
            setattr(scheduler, name, [getattr(scheduler, name)[place] for place, _ in origins])
