"""What callbacks add to a step, by parameters, by ranks and by their number: is it linear, and with which slope?

Each figure is a step of a Trainer with the callbacks less one without them, in the same round. Parameters: EMA,
AutoClip and SkipNonFinite on a stack of square linear layers, from 100,000 to a billion as memory allows; the slope is
that of the logarithms, which is 1 where the cost grows as the parameters do. Ranks: the same callbacks under DDP, a
million parameters, with gloo processes of one thread; where there are fewer cores than processes these wait for each
other, and the figure says nothing of more machines. Callbacks: several averages, which all cost the same.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fitted import PLAIN, Callbacks, Net, drawn, empty, fit, tiny
from lightning.pytorch.callbacks import Callback
from machine import available
from rows import Row, added_rows, figure, row, target
from scaling import line, points
from settings import SEED, Settings
from timing import fits, in_turns
from torch import nn

import lightning_tricks as lt

NAME = "step_scaling"
PEERS = ()
PARAMETERS, RANKS, CALLBACKS = "by parameters", "by ranks", "by callbacks"
UNITS = {PARAMETERS: "parameters", RANKS: "ranks (gloo)", CALLBACKS: "callbacks"}
SLOPE, HALF = "slope", "half of its 95% interval"
ON = "with callbacks"
TENSORS = 5  # of the size of the weights: these, gradients, averages, and what a step takes in between
LIMIT = 300  # seconds of the fits of some processes
SCRIPT = Path(__file__).parent.parent / "ranks_step.py"


def usual() -> list[Callback]:
    """Callbacks that read or write every weight or gradient in every step."""
    return [lt.EMA(), lt.AutoClip(), lt.SkipNonFinite()]


def averages(count: int) -> list[Callback]:
    """So many, with different decays."""
    return [lt.EMA(1 - 0.001 * (number + 1), validate="raw", at_end="raw") for number in range(count)]


def stack(parameters: int, device: str) -> nn.Module:
    """Layers of at most a million parameters; filled, since drawing a billion numbers takes longer than all else."""
    width = min(1000, round(parameters**0.5))
    with torch.device("meta"):
        layers = [nn.Linear(width, width, bias=False) for _ in range(round(parameters / width**2))]
    network = nn.Sequential(*layers).to_empty(device=device)
    with torch.no_grad():
        for weight in network.parameters():
            weight.fill_(1 / width)
    return network


def added(contenders: dict[str, Callable[[], float]], rounds: int, case: str, names: dict[str, str]) -> list[Row]:
    """What the contenders add to the plain one, under the names of the rows."""
    measured = in_turns(fits(contenders), rounds, warm_up=1)
    found = added_rows(case, measured, PLAIN)
    return [each._replace(what=names[each.what]) for each in found]


def by_parameters(parameters: int, steps: int, rounds: int, device: str) -> list[Row]:
    """A step of a network of this size, with the callbacks and without."""
    width = min(1000, round(parameters**0.5))

    def step(callbacks: Callbacks) -> float:
        gc.collect()  # the weights of the last one
        return fit(Net(stack(parameters, device)), drawn((4, width), 4, device), steps, callbacks(), every=1)

    contenders = {PLAIN: partial(step, empty), ON: partial(step, usual)}
    return added(contenders, rounds, PARAMETERS, {ON: f"{parameters:,} parameters"})


def by_callbacks(counts: Sequence[int], steps: int, rounds: int, device: str) -> list[Row]:
    """A step of a tiny network with so many averages."""
    batch = drawn((32, 32), 4, device)

    def step(callbacks: Callbacks) -> float:
        torch.manual_seed(SEED)
        return fit(Net(tiny()), batch, steps, callbacks(), every=10)

    contenders = {PLAIN: partial(step, empty)}
    contenders |= {str(count): partial(step, partial(averages, count)) for count in counts}
    return added(contenders, rounds, CALLBACKS, {str(count): f"{count} callbacks" for count in counts})


def by_ranks(ranks: int, rounds: int, device: str) -> Row:
    """A step under DDP, as the first rank measures it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "it.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(SCRIPT), device, str(rounds), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        what = f"{ranks} ranks"
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return Row(RANKS, what, "us", None, note=f"failed: {reason}")
        return row(RANKS, what, json.loads(path.read_text()), "us")


def run(settings: Settings) -> list[Row]:
    """All points, and the slopes of the lines through them."""
    sizes = settings.pick(
        "parameters", (10**5, 10**6, 10**7, 10**8, 10**9), (10**5, 10**6, 10**7), (10**4, 10**5, 10**6)
    )
    rounds, steps = settings.pick("rounds", 7, 3, 1), settings.pick("steps", 12, 8, 4)
    found: list[Row] = []
    for size in sizes:
        need = 4 * size * TENSORS
        if need > available(settings.device):
            what = f"{size:,} parameters"
            note = f"skipped: memory, it needs {need / 1e9:.3g} GB"
            found.append(Row(PARAMETERS, what, "us", None, note=note))
            continue
        large = size >= 10**8
        found += by_parameters(size, 4 if large else steps, min(rounds, 3) if large else rounds, settings.device)
    for ranks in settings.pick("ranks", (1, 2, 3, 4), (1, 2, 3), ()):
        found.append(by_ranks(ranks, rounds, settings.device))
    counts = settings.pick("callbacks", (1, 2, 3, 4, 6, 8, 10, 12), (1, 4, 8, 12), (1, 2, 3))
    found += by_callbacks(counts, settings.pick("tiny_steps", 200, 100, 30), rounds, settings.device)
    return [*found, *slopes(found)]


def slopes(rows: Sequence[Row]) -> list[Row]:
    """Of the line through the points of each case; one with fewer than three points has none."""
    found = []
    result = {"rows": [each._asdict() for each in rows]}
    for case in UNITS:
        xs, measured = points(result, case)
        ys, unit = [each["median"] for each in measured], f"us a {case.split()[1].removesuffix('s')}"
        if case == PARAMETERS:
            kept = [(log(x), log(y)) for x, y in zip(xs, ys, strict=True) if x >= 10**6 and y > 0]
            xs, ys, unit = [x for x, _ in kept], [y for _, y in kept], "of the logarithms, from a million on"
        if len(xs) > 2:
            fitted = line(xs, ys)
            pairs = ((SLOPE, fitted.slope), (HALF, fitted.half), ("explained", fitted.explained))
            found += [
                row(f"line {case}", what, [value], "share" if what == "explained" else unit) for what, value in pairs
            ]
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """As the parameters grow and not faster, and as the callbacks do."""
    slope = figure(rows, f"line {PARAMETERS}", SLOPE)
    explained = figure(rows, f"line {CALLBACKS}", "explained")
    return [
        target("slope of the logarithms, by parameters", slope, "<=", 1.15),
        target("share of the variance that a line explains, by callbacks", explained, ">=", 0.95),
    ]
