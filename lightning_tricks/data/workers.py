"""The number of loader workers that loads in time, measured on the user's own loader."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.lightning.loaders import available_cores, generators_of

__all__ = ["WorkersResult", "find_num_workers"]

NEAR = 1.05  # a time that is at most so many times the shortest is as good
STEADY = 0.1  # the largest relative difference between the times of one setting that are called the same


@dataclass(frozen=True)
class WorkersResult:
    """The result of ``find_num_workers``; as a string, the arguments to pass and why.

    Args:
        num_workers: The number of workers to pass.
        prefetch_factor: The batches that each of them loads ahead; None without workers.
        seconds: The median seconds of a step by number of workers.
        spread: The largest relative difference between rounds of the settings that were compared in the end.
        cores: The number of cores of this process.
        step_seconds: The seconds in which training does not need the loader, as passed.
        pin_memory: Whether there is a GPU that copies pinned memory without waiting.

    Example:
        >>> result = WorkersResult(2, 2, {0: 0.04, 1: 0.02, 2: 0.01}, spread=0.03, cores=2, step_seconds=0.01)
        >>> print(result)
        DataLoader(..., num_workers=2, persistent_workers=True)
        A step takes 10 ms, 4.0 times less than without workers (40 ms).
    """

    num_workers: int
    prefetch_factor: int | None
    seconds: dict[int, float]
    spread: float
    cores: int
    step_seconds: float = 0.0
    pin_memory: bool = False

    @property
    def noisy(self) -> bool:
        """Whether times differ so much that another number may be as good or better."""
        return self.spread > STEADY

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        return {**asdict(self), "noisy": self.noisy}

    def __str__(self) -> str:
        settings = [f"num_workers={self.num_workers}"]
        settings += ["persistent_workers=True"] if self.num_workers else []
        settings += [f"prefetch_factor={self.prefetch_factor}"] if self.prefetch_factor not in (None, 2) else []
        settings += ["pin_memory=True"] if self.pin_memory else []
        step, alone = self.seconds[self.num_workers], self.seconds[0]
        lines = [f"DataLoader(..., {', '.join(settings)})"]
        if self.num_workers:
            times = f"{alone / step:.1f} times less than without workers ({_spelled(alone)})"
            lines.append(f"A step takes {_spelled(step)}, {times}.")
        else:
            lines.append(f"A step takes {_spelled(step)}, and workers do not make it shorter.")
        if self.step_seconds and step > NEAR * self.step_seconds:
            lines.append(
                f"{1 - self.step_seconds / step:.0%} of it still waits for data: make samples cheaper, or use more"
                " cores."
            )
        if self.noisy:
            lines.append(
                f"This is noisy: the same setting differs by {self.spread:.0%} between rounds. Let nothing else run,"
                " and measure again with more seconds."
            )
        return "\n".join(lines)


def _spelled(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def find_num_workers(
    loader: DataLoader[Any],
    *,
    step_seconds: float = 0.0,
    most: int | None = None,
    seconds: float = 1.0,
    rounds: int = 5,
) -> WorkersResult:
    """Find the fewest workers with which a loader keeps up with training, by timing it with several numbers of them.

    Steps are timed as in training: the next batch is taken, then nothing is done for ``step_seconds`` while workers
    load ahead. Each number from 0 to the cores (beyond 8 every second, fourth, ... one) is timed in rounds until the
    times of the best ones differ by less than a tenth, or there were ``rounds``; the result says if they still do. It
    is the fewest workers whose step is at most a twentieth longer than the shortest. Random numbers, and the order of
    the loader's next epoch, are left as they were. Workers load for all ranks of a machine: call it with the
    cores of one, ``most=cores // devices``.

    Args:
        loader: A DataLoader, as for ``trainer.fit``.
        step_seconds: The seconds in which training does not need the loader: those of a training step on a GPU. 0 finds
            the workers that load as fast as this machine can.
        most: The largest number of workers to try; None for the number of cores. More help only where loading waits for
            a network or a disk.
        seconds: How long a number of workers is timed in a round.
        rounds: The largest number of rounds, at least 2.

    Raises:
        TypeError: For what is no DataLoader, or a value of the wrong type.
        ValueError: For a value out of range, or a loader without batches.

    Example:
        >>> loader = DataLoader([torch.ones(2)] * 64, batch_size=8)
        >>> find_num_workers(loader, most=0, seconds=0.01).num_workers
        0
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"loader must be a torch DataLoader, got {type(loader).__name__}.")
    check_range("step_seconds", step_seconds, 0.0)
    check_range("seconds", seconds, 0.0)
    check_count("rounds", rounds, least=2)
    cores = available_cores()
    check_count("most", most, least=0, optional=True)
    largest = cores if most is None else most
    prefetch = loader.prefetch_factor or 2
    times: dict[int, list[float]] = {workers: [] for workers in candidates(largest)}
    with ExitStack() as undo:
        undo.enter_context(isolate_rng())
        for generator in generators_of(loader):
            undo.callback(generator.set_state, generator.get_state())
        for done in range(1, rounds + 1):
            for workers, found in times.items():
                found.append(seconds_of_step(with_workers(loader, workers, prefetch), step_seconds, seconds))
            best = best_of(times)
            rivals = [found for found in times.values() if median(found) <= (NEAR + STEADY) * median(times[best])]
            spread = max(map(relative_spread, rivals))
            if done > 1 and spread <= STEADY:
                break
        if best:
            ahead = [seconds_of_step(with_workers(loader, best, 2 * prefetch), step_seconds, seconds) for _ in range(2)]
            prefetch = 2 * prefetch if max(ahead) < (1 - STEADY) * median(times[best]) else prefetch
    means = {workers: median(found) for workers, found in times.items()}
    gpu = torch.cuda.is_available()
    return WorkersResult(best, prefetch if best else None, means, spread, cores, step_seconds, gpu)


def candidates(largest: int) -> list[int]:
    """All numbers of workers up to 8, and then about 8 more up to the largest.

    >>> candidates(3), candidates(32)
    ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 17, 20, 23, 26, 29, 32])
    """
    beyond = range(largest, 8, -max(1, (largest - 8 + 7) // 8))
    return [*range(min(largest, 8) + 1), *reversed(beyond)]


def best_of(times: dict[int, list[float]]) -> int:
    """The fewest workers whose median time is nearly the shortest."""
    shortest = min(map(median, times.values()))
    return min(workers for workers, found in times.items() if median(found) <= NEAR * shortest)


def relative_spread(found: Sequence[float]) -> float:
    """The difference between the longest and the shortest time, as a part of the shortest."""
    return max(found) / max(min(found), 1e-9) - 1


def with_workers(loader: DataLoader[Any], workers: int, prefetch: int) -> DataLoader[Any]:
    """A copy of a loader, of any class, with other workers."""
    changed = copy(loader)  # a DataLoader refuses setattr for some attributes
    settings = {"num_workers": workers, "prefetch_factor": prefetch if workers else None, "_iterator": None}
    # Workers are started once, also for a loader with few batches; a time-out is refused where there are none.
    changed.__dict__.update(settings, persistent_workers=workers > 0, timeout=loader.timeout if workers else 0)
    return changed


def seconds_of_step(loader: DataLoader[Any], step_seconds: float, seconds: float) -> float:
    """The mean seconds of a step in ``seconds``, once the workers have begun and what they load ahead is used up."""
    batches = _endless(loader)
    for _ in islice(batches, 1 + loader.num_workers * (loader.prefetch_factor or 0)):
        time.sleep(step_seconds)
    steps, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds or steps < 2 * max(loader.num_workers, 1):
        next(batches)
        time.sleep(step_seconds)
        steps += 1
    return passed / steps


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    while True:
        empty = True
        for batch in loader:
            yield batch
            empty = False
        if empty:
            raise ValueError("loader has no batches: nothing can be timed.")
