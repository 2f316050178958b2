"""One rank of ``cost/step_scaling.py``: fits under DDP with callbacks and without, in turns, whose times it writes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from cost.step_scaling import stack, usual
from fitted import Callbacks, Net, drawn, empty, fit
from machine import prepare

SIZE, STEPS = 10**6, 30


def main(device: str, rounds: str, path: str) -> None:
    """Fit and write what the callbacks add to a step, in microseconds, one number a round."""
    prepare(())
    torch.set_num_threads(1)
    batch = drawn((4, 1000), 4, device)

    def step(callbacks: Callbacks) -> float:
        settings = {"strategy": "ddp", "devices": int(os.environ["LOCAL_WORLD_SIZE"])}
        return fit(Net(stack(SIZE, device)), batch, STEPS, callbacks(), every=2, **settings)

    step(usual)
    times = []
    for _ in range(int(rounds)):
        plain = step(empty)
        times.append(step(usual) - plain)
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(times))


if __name__ == "__main__":
    main(*sys.argv[1:])
