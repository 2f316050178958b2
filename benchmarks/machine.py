"""The machine that figures belong to, how it is prepared, and how its time and memory are measured."""

from __future__ import annotations

import gc
import logging
import os
import platform
import random
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

Work = Callable[[], object]
WARM_UP = 3  # the first rounds are not counted


def machine(*packages: str) -> dict[str, object]:
    """The CPU, and the versions of Python, torch, lightning and the packages named."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "lightning", *packages)},
    }


def prepare(peers: Sequence[str], threads: int) -> None:
    """Raise if a peer is not installed; set the threads, and quiet what Lightning says in every fit."""
    if missing := [name for name in peers if find_spec(name.replace("-", "_")) is None]:
        raise SystemExit(f"The peers are missing: {', '.join(missing)}. Run: python -m pip install {' '.join(missing)}")
    torch.set_num_threads(threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # which devices there are
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec")


def in_turns(turns: Sequence[dict[str, Work]], rounds: int, floor: str, device: str) -> dict[str, dict[str, float]]:
    """Times of each work and its ratio to the floor; without garbage collection, as ``timeit`` does.

    The works of a turn follow each other; the turns are shuffled in every round, since it matters a few per cent what
    the one before has left in the caches.
    """
    times: dict[str, list[float]] = {name: [] for turn in turns for name in turn}
    shuffled = random.Random(0)
    gc.collect()
    gc.disable()
    for _ in range(WARM_UP + rounds):
        for turn in shuffled.sample(turns, len(turns)):
            for name, work in turn.items():
                times[name].append(microseconds(work, device))
    gc.enable()
    times = {name: each[WARM_UP:] for name, each in times.items()}
    return {name: {**spread(each), "over_floor": over(each, times[floor])} for name, each in times.items()}


def microseconds(work: Work, device: str) -> float:
    """How long the work takes; on a GPU from the event before it to the event behind it."""
    if device == "cpu":
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e6
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3


def spread(times: list[float]) -> dict[str, float]:
    """The median and the limits."""
    return {"median_us": round(median(times), 1), "min_us": round(min(times), 1), "max_us": round(max(times), 1)}


def over(times: list[float], floor: list[float]) -> float:
    """The median of the ratios within a round: the load of a machine drifts from one round to the next."""
    return round(median(time / lowest for time, lowest in zip(times, floor, strict=True)), 3)


def memory(work: Work, device: str, unit: int) -> tuple[dict[str, float], object]:
    """Bytes (divided by ``unit``) that the work takes at its peak and that it leaves, and what it returned."""
    gc.collect()
    if device == "cpu":
        with NewStorages() as count:
            held = work()
        peak, kept = count.peak, count.alive
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        held = work()
        peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    return {"peak": round(peak / unit, 3), "kept": round(kept / unit, 3)}, held


class NewStorages(TorchDispatchMode):
    """Counts the bytes of storages made, less those freed, since it was entered; and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()
        for storage in storages([each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]):
            self._watch(storage)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for storage in storages((args, kwargs, result)):
            if storage._cdata not in self._known:
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                self._watch(storage)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes()).atexit = False

    def _freed(self, key: int, nbytes: int) -> None:
        self.alive -= nbytes
        self._known.discard(key)


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """The storages of the tensors in a tree, each once."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return list({storage._cdata: storage for storage in found}.values())


class Laps(Callback):
    """Notes the time every ``every`` batches, when the device has done its work."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        if batch_idx % self.every == 0:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter() * 1e6)

    def step(self) -> float:
        """Microseconds of a step; the first lap warms up."""
        return median(after - before for before, after in pairwise(self.marks[1:])) / self.every


def fit(
    module: pl.LightningModule, batch: Any, steps: int, callback: Callback, device: str, *, every: int = 20
) -> float:
    """Microseconds of a training step with the callback, the batch lying ready."""
    laps = Laps(every)
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        max_epochs=1,
        callbacks=[laps, callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([batch] * steps, batch_size=None))
    return laps.step()


def table(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print rows of figures under their names."""
    columns = list(next(iter(rows.values())))
    print(f"\n{title:<42}" + "".join(f"{column:>16}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<42}" + "".join(f"{row[column]!s:>16}" for column in columns), flush=True)
