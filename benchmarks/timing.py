"""How long works take: in turns with their floors, so that the load of the machine falls on all alike."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Work = Callable[[], object]
Timed = Callable[[], float]  # gives the microseconds that it took
Turn = dict[str, Timed]  # works that follow each other
WARM_UP = 2  # the first rounds are not counted


class Measured(NamedTuple):
    """Microseconds of each round by contender, and why others have none."""

    times: dict[str, list[float]]
    failed: dict[str, str]


def clock(device: str) -> float:
    """Seconds: on a CPU those of this process, which other work hardly changes; on a GPU when it has done its work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Work, device: str) -> Timed:
    """The work with a clock; on a GPU from the event before it to the event after it."""

    def on_cpu() -> float:
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e6

    def on_gpu() -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e3

    return on_cpu if device == "cpu" else on_gpu


def in_turns(makers: Mapping[str, Callable[[], Turn]], rounds: int, warm_up: int = WARM_UP) -> Measured:
    """Microseconds of every contender in every round; one that raises is left out, with its error.

    The turns are shuffled in every round, since it matters a few per cent what the one before has left in the caches.
    Garbage is collected between the rounds only, as ``timeit`` does.
    """
    measured = Measured({}, {})
    turns: dict[str, Turn] = {}
    for name, make in makers.items():
        try:
            turns[name] = make()
            for work in turns[name].values():
                work()
        except Exception as error:  # a peer's, whatever it is, becomes a row
            measured.failed[name] = f"failed: {type(error).__name__}: {error}"
            turns.pop(name, None)
    measured.times.update({part: [] for turn in turns.values() for part in turn})
    shuffled = random.Random(0)
    gc.collect()
    gc.freeze()
    try:
        for number in range(warm_up + rounds):
            gc.collect()
            gc.disable()
            for name in shuffled.sample(list(turns), len(turns)):
                for part, work in turns[name].items():
                    taken = work()
                    if number >= warm_up:
                        measured.times[part].append(taken)
    finally:
        gc.enable()
        gc.unfreeze()
    return measured


def works(contenders: Mapping[str, Callable[[], Work]], device: str) -> dict[str, Callable[[], Turn]]:
    """Turns of one work each, set up when their time has come."""
    return {name: lambda name=name, make=make: {name: timed(make(), device)} for name, make in contenders.items()}


def fits(contenders: Mapping[str, Timed]) -> dict[str, Callable[[], Turn]]:
    """Turns of one fit each, which tells its own time."""
    return {name: lambda name=name, fit=fit: {name: fit} for name, fit in contenders.items()}
