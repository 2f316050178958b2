"""The bytes that tensors take on the simulated device and in host memory, now and at their peak."""

from __future__ import annotations

import weakref

from torch import Tensor


class Memory:
    """Counts each storage once, from the operation that makes it until it is freed."""

    def __init__(self) -> None:
        self.live = {"device": 0, "host": 0}
        self.peak = dict(self.live)

    def note(self, x: Tensor, where: bool | None) -> None:
        """Count a new tensor, on the device or not."""
        storage = x.untyped_storage()
        place, size = "device" if where else "host", storage.nbytes()
        self.live[place] += size
        self.peak[place] = max(self.peak[place], self.live[place])
        weakref.finalize(storage, self._free, place, size)

    def _free(self, place: str, size: int) -> None:
        self.live[place] -= size
