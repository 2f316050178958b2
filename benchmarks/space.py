"""How much memory works take, counted by the storages that they make."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import torch
from timing import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
    found = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            with suppress(NotImplementedError, ValueError):  # undefined tensors and lazy weights have none
                found[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
    return list(found.values())
