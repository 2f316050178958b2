"""EMA and SAM by the number of parameters, from a million to a billion, where memory allows.

The network is a stack of 1000 x 1000 linear layers. A case that needs more than two thirds of the free memory is
skipped, and its row says so; the largest has one round.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from cost.ema import tracked
from cost.sam import SharpNet, ours
from fitted import PLAIN, Net, drawn, fit
from machine import available
from rows import Row, row, rows_of
from settings import Settings
from timing import fits, in_turns, works
from torch import Tensor, nn

NAME = "scaling"
PEERS = ()
MILLION = 10**6
UPDATE, PERTURB, STEP = "EMA update", "SAM perturb and restore", "SAM step"
# of the size of the weights: with averages; with old ones and gradients; with autograd's
TENSORS = {UPDATE: 2, PERTURB: 3, STEP: 4}
COPIES = {UPDATE: 3 / 2, PERTURB: 8 / 2}  # traffic over that of a copy of the weights


def deep(millions: int, device: str) -> nn.Module:
    """So many million parameters; filled, since drawing a billion numbers takes longer than all else."""
    with torch.device("meta"):
        network = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(millions)])
    network = network.to_empty(device=device)
    with torch.no_grad():
        for weight in network.parameters():
            weight.fill_(1e-3)
    return network


def updates(millions: int, rounds: int, device: str) -> list[Row]:
    """An update of the averages over its traffic."""
    module = deep(millions, device)
    averages = tracked(module)
    parts = list(averages.tensors.values())
    return over_traffic(UPDATE, partial(averages.lerp, 0.001), parts, list(module.parameters()), rounds, device)


def perturbations(millions: int, rounds: int, device: str) -> list[Row]:
    """Norm, copy, addition, copy back."""
    weights = list(deep(millions, device).parameters())
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-6)
    return over_traffic(PERTURB, ours(weights), [weight.grad for weight in weights], weights, rounds, device)


def over_traffic(
    what: str, work: Callable[[], object], to: list[Tensor], source: list[Tensor], rounds: int, device: str
) -> list[Row]:
    """A row with the traffic at a copy's bandwidth as its floor."""
    copy = torch.no_grad()(partial(torch._foreach_copy_, to, source))
    measured = in_turns(works({"copy": lambda: copy, what: lambda: work}, device), rounds, warm_up=0)
    floor = "its traffic at a copy's bandwidth"
    measured.times[floor] = [COPIES[what] * time for time in measured.times.pop("copy")]
    return rows_of("", measured, floor, "ms")


def steps(millions: int, rounds: int, device: str) -> list[Row]:
    """A step with SAM over a plain one in a Trainer; SGD has no state."""
    batch = drawn((8, 1000), 4, device)

    def step(kind: type[Net]) -> float:
        return fit(kind(deep(millions, device)), batch, 5, every=1)

    measured = in_turns(fits({PLAIN: partial(step, Net), STEP: partial(step, SharpNet)}), rounds, warm_up=0)
    return rows_of("", measured, PLAIN, "ms")


MEASURES = {UPDATE: updates, PERTURB: perturbations, STEP: steps}


def run(settings: Settings) -> list[Row]:
    """Each by size."""
    found = []
    sizes = settings.pick("millions of parameters", (1, 10, 100, 1000), (1, 10), (1,))
    rounds = settings.pick("rounds", (15, 10, 3, 1), (3, 2), (1,))
    for millions, count in zip(sizes, rounds, strict=True):
        for what, measure in MEASURES.items():
            gc.collect()  # what the last one has left
            need, case = 4 * MILLION * millions * TENSORS[what], f"{what}, {millions} M parameters"
            if 1.5 * need > available(settings.device):
                found.append(Row(case, what, "ms", None, note=f"skipped: memory, it needs {need / 1e9:.0f} GB"))
            else:
                found += [each._replace(case=case) for each in measure(millions, count, settings.device)]
    return [*found, *per_parameter(found)]


def per_parameter(rows: Sequence[Row]) -> list[Row]:
    """What stays the same where memory traffic is all there is."""
    ours = [each for each in rows if each.what in MEASURES and each.median is not None]
    sizes = [int(each.case.split(", ")[1].split()[0]) for each in ours]
    return [
        row("a million parameters", each.case, [each.median / size], "ms")
        for each, size in zip(ours, sizes, strict=True)
    ]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """None: the floors stand beside the figures."""
    return []
