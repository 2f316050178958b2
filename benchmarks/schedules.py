"""What a step of the scheduler costs, beside torch's schedulers, with one parameter group and with more.

Run ``python benchmarks/schedules.py`` (about half a minute); it prints tables and writes
``benchmarks/results/schedules.json``. In every round all contenders take their turn, shuffled, in one process, and each
takes many steps. Times are medians over the rounds; the load of a machine drifts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import Work, in_turns, machine, prepare, table
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from lightning_tricks.schedules import CurveLR, curves, one_cycle

RESULTS = Path(__file__).parent / "results"
STEPS = 200  # of a turn
GROUPS = (1, 11)
FLOOR = "torch CosineAnnealingLR"
TOTAL = 10**6  # steps, more than are taken
TARGETS = {"step_us": 10.0, "further_group_us": 2.0}  # at most


def ours(curve: Callable[..., float]) -> Callable[[Optimizer], LRScheduler]:
    return lambda optimizer: CurveLR(optimizer, partial(curve, total_steps=TOTAL))


def cycled(optimizer: Optimizer) -> LRScheduler:
    return one_cycle(optimizer, total_steps=TOTAL, momentum=(0.85, 0.95))["lr_scheduler"]["scheduler"]


def halved(step: int) -> float:
    return 0.5 ** (step / TOTAL)


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "CurveLR cosine": ours(curves.cosine),
    "CurveLR flat_cos": ours(curves.flat_cos),
    "CurveLR one_cycle": ours(curves.one_cycle),
    "CurveLR one_cycle, momentum": cycled,
    FLOOR: lambda optimizer: CosineAnnealingLR(optimizer, TOTAL),
    "torch OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, TOTAL, cycle_momentum=False),
    "torch OneCycleLR, momentum": lambda optimizer: OneCycleLR(optimizer, 0.1, TOTAL),
    "torch LambdaLR": lambda optimizer: LambdaLR(optimizer, halved),
}


def steps_of(kind: Callable[[Optimizer], LRScheduler], groups: int) -> Work:
    """Many steps of a scheduler."""
    parameters = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scheduler = kind(optimizer)
    optimizer.step()  # without which a scheduler warns

    def work() -> None:
        for _ in range(STEPS):
            scheduler.step()

    return work


def measure(rounds: int) -> dict[str, Any]:
    """All figures, printed as they come."""
    names = {(name, groups): f"{name}, {groups} groups" for name in SCHEDULERS for groups in GROUPS}
    turns = [{label: steps_of(SCHEDULERS[name], groups)} for (name, groups), label in names.items()]
    times = in_turns(turns, rounds, names[FLOOR, 1], "cpu")
    of_step = {key: times[label]["median_us"] / STEPS for key, label in names.items()}
    fewest, most = GROUPS
    rows = {
        name: {
            "step_us": round(of_step[name, fewest], 2),
            "further_group_us": round((of_step[name, most] - of_step[name, fewest]) / (most - fewest), 3),
            "over_torch_cosine": times[names[name, fewest]]["over_floor"],
        }
        for name in SCHEDULERS
    }
    table("scheduler.step()", rows)
    settings = {"threads": torch.get_num_threads(), "rounds": rounds, "steps": STEPS, "groups": GROUPS}
    result = {"machine": machine(), "settings": settings, "schedulers": rows, "targets": targets(rows)}
    table("targets", result["targets"])
    return result


def targets(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """What was aimed at for each of ours, and whether it was reached."""
    return {
        f"{name}: {figure}": {"value": row[figure], "target": f"<= {limit}", "met": row[figure] <= limit}
        for name, row in rows.items()
        if not name.startswith("torch")
        for figure, limit in TARGETS.items()
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--output", type=Path, default=RESULTS / "schedules.json", help="where the figures go")
    args = parser.parse_args()
    prepare((), args.threads)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(measure(2 if args.quick else args.rounds), indent=1) + "\n")


if __name__ == "__main__":
    main()
