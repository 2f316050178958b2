"""The random generators of a loader's workers: their states come with every batch, and are set where a pass goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lightning_tricks.core.exact.generators import Generators
from lightning_tricks.core.exact.plain import packed, plain, unpacked


class InWorker:
    """The ``worker_init_fn`` and the ``collate_fn`` of a loader whose workers tell the states of their generators.

    Args:
        collate: The ``collate_fn`` of the user.
        init: The ``worker_init_fn`` of the user.
        states: The states to begin with, by the numbers of the workers; None where that of seeding is right.
    """

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], Any] | None, states: Sequence[Any]) -> None:
        self._collate = collate
        self._init = init
        self._states = states
        self._told: Any = None

    def begin(self, worker: int) -> None:
        """Begin in a worker."""
        if self._init is not None:
            self._init(worker)
        info: Any = get_worker_info()
        self._generators = Generators(torch.device("cpu"), {"dataset": info.dataset, "collate_fn": self._collate})
        if self._states[worker] is not None:
            self._generators.load(self._states[worker])
        self._told = packed(plain(self._generators.state()))

    def collate(self, samples: Any) -> tuple[Any, Any]:
        """A batch, and the state after it; None for one that has not changed."""
        batch, state = self._collate(samples), packed(plain(self._generators.state()))
        told, self._told = self._told, state
        return batch, None if state == told else state


class WorkerStates:
    """The states of the workers after the last batches of a pass, in the order of the batches.

    Worker w makes the batches w, w + count, w + 2 * count, ...

    Args:
        before: The states before the first batch, of each worker; None for that of seeding.
    """

    def __init__(self, before: Sequence[Any]) -> None:
        self.count = len(before)
        self._states = deque(before, maxlen=2 * self.count + 4)

    def add(self, told: Any) -> None:
        """Note what came with the next batch."""
        self._states.append(self._states[-self.count] if told is None else told)

    def before(self, batch: int, batches: int) -> list[Any]:
        """The states of the workers before a batch, one of the first worker, when so many batches were delivered."""
        end = len(self._states) - (batches - batch)
        return list(map(unpacked, list(self._states)[end - self.count : end]))

    def latest(self, batches: int) -> list[Any]:
        """The states of the workers when so many batches were delivered."""
        return [unpacked(self._states[-1 - (batches - 1 - worker) % self.count]) for worker in range(self.count)]
