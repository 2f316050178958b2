"""A step of the scheduler beside torch's and timm's, with one parameter group and with more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from rows import Row, figure, row, rows_of, target
from settings import Settings
from timing import Measured, Work, in_turns, works
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from lightning_tricks.schedules import CurveLR, curves, one_cycle

NAME = "schedules"
PEERS = ("timm",)
STEPS = 200  # of a turn
GROUPS = (1, 11)
FLOOR = "torch CosineAnnealingLR"
TOTAL = 10**6  # steps, more than are taken
LIMITS = {"1 group": 10.0, "a further group": 2.0}  # us

Stepped = Callable[[Optimizer], Callable[[], object]]


def ours(curve: Callable[..., float]) -> Stepped:
    return lambda optimizer: CurveLR(optimizer, partial(curve, total_steps=TOTAL)).step


def cycled(optimizer: Optimizer) -> Callable[[], object]:
    return one_cycle(optimizer, total_steps=TOTAL, momentum=(0.85, 0.95))["lr_scheduler"]["scheduler"].step


def timm(optimizer: Optimizer) -> Callable[[], object]:
    from timm.scheduler import CosineLRScheduler

    scheduler, numbers = CosineLRScheduler(optimizer, t_initial=TOTAL, t_in_epochs=False), count()
    return lambda: scheduler.step_update(next(numbers))


def halved(step: int) -> float:
    return 0.5 ** (step / TOTAL)


SCHEDULERS: dict[str, Stepped] = {
    "CurveLR cosine": ours(curves.cosine),
    "CurveLR flat_cos": ours(curves.flat_cos),
    "CurveLR one_cycle": ours(curves.one_cycle),
    "CurveLR one_cycle, momentum": cycled,
    FLOOR: lambda optimizer: CosineAnnealingLR(optimizer, TOTAL).step,
    "torch OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, TOTAL, cycle_momentum=False).step,
    "torch OneCycleLR, momentum": lambda optimizer: OneCycleLR(optimizer, 0.1, TOTAL).step,
    "torch LambdaLR": lambda optimizer: LambdaLR(optimizer, halved).step,
    "timm CosineLRScheduler": timm,
}


def steps_of(kind: Stepped, groups: int) -> Work:
    """Many steps of a scheduler."""
    parameters = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    step = kind(optimizer)
    optimizer.step()  # without which a scheduler warns

    def work() -> None:
        for _ in range(STEPS):
            step()

    return work


def run(settings: Settings) -> list[Row]:
    """A step, and what it takes longer for each further group."""
    contenders = {
        (what, groups): partial(steps_of, kind, groups) for what, kind in SCHEDULERS.items() for groups in GROUPS
    }
    found = in_turns(works(contenders, "cpu"), settings.pick("rounds", 50, 10, 1))
    fewest, most = GROUPS
    times = {what: [t / STEPS for t in each] for (what, groups), each in found.times.items() if groups == fewest}
    failed = {what: error for (what, groups), error in found.failed.items() if groups == fewest}
    rows = rows_of("1 group", Measured(times, failed), FLOOR)
    for what in times:
        both = zip(found.times[what, fewest], found.times[what, most], strict=True)
        further = [(more - less) / STEPS / (most - fewest) for less, more in both]
        rows.append(row("a further group", what, further, "us"))
    return rows


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each of ours."""
    mine = [each for each in rows if each.what.startswith("CurveLR")]
    return [
        target(f"{each.what}: us of {each.case}", figure(rows, each.case, each.what), "<=", LIMITS[each.case])
        for each in mine
    ]
