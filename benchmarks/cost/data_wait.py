"""Measuring how long training waits for data: DataWait beside Lightning's profiler and a Trainer that measures nothing.

The time is that of a step of a tiny network, so that what is seen is what the measurement adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fitted import PLAIN, Net, drawn, empty, fit, tiny
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import SimpleProfiler
from rows import Row, added_rows, figure, rows_of, target
from settings import SEED, Settings
from timing import fits, in_turns

import lightning_tricks as lt

NAME = "data_wait"
PEERS = ()
OURS, SIMPLE = "lightning_tricks DataWait", "Lightning SimpleProfiler"
HOOKS = "empty hooks"
CONTENDERS: dict[str, tuple[Any, dict[str, Any]]] = {  # callbacks, and arguments of the Trainer
    PLAIN: (empty, {}),
    HOOKS: (lambda: [Callback()], {}),
    OURS: (lambda: [lt.DataWait()], {}),
    SIMPLE: (empty, {"profiler": SimpleProfiler}),
}


def run(settings: Settings) -> list[Row]:
    """A step with each."""
    steps = settings.pick("steps", 300, 120, 60)
    batch = drawn((32, 32), 4, settings.device)

    def step(callbacks: Any, arguments: dict[str, Any]) -> float:
        torch.manual_seed(SEED)
        with TemporaryDirectory() as folder:  # for the profiler's report
            made = {name: kind(folder, "report") for name, kind in arguments.items()}
            return fit(Net(tiny()), batch, steps, callbacks(), **made)

    timed = {name: partial(step, *each) for name, each in CONTENDERS.items()}
    measured = in_turns(fits(timed), settings.pick("fits", 10, 2, 1), warm_up=0)
    return [*rows_of("step, tiny", measured, PLAIN), *added_rows("added to a step, tiny", measured, PLAIN)]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Less than the profiler that answers the same question."""
    case = "added to a step, tiny"
    ours, simple = (figure(rows, case, what) for what in (OURS, SIMPLE))
    over = None if ours is None or not simple else round(ours / simple, 3)
    return [
        target("tiny: us added to a step", ours, "<=", 60),
        target("tiny: added over what SimpleProfiler adds", over, "<=", 1.0),
    ]
