"""Exchange of weights and averages in place, and copies to the host; apart from averages, which hold and compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_tricks.core.weights.tensors import buckets, copy_, lerp_


class Exchange:
    """Exchanges the values of weights and of their averages, bucket by bucket, and back.

    Weights are written in place; averages are replaced by new tensors. Only one bucket (``core.weights.buckets``) takes
    additional memory. After an interruption at any instruction ``run`` can be called again, in either direction,
    without losing a value.

    Args:
        names: The keys of the averages.
        weights: The weights in the order of ``names``.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self.names = names
        self._buckets = buckets(weights)
        self._exchanged = 0  # the number of exchanged buckets, from the first on
        self._open: tuple[slice, int, list[Tensor], list[Tensor]] | None = None

    def run(self, weights: Sequence[Tensor], averages: dict[str, Tensor], *, back: bool = False) -> None:
        """Exchange all values, or exchange them ``back``."""
        self._close(weights, averages)
        step, end = (-1, 0) if back else (1, len(self._buckets))
        while self._exchanged != end:
            bucket = self._buckets[self._exchanged - back]
            with torch.no_grad():
                theirs = [averages[name] for name in self.names[bucket]]
                ours = [w.to(a.device, copy=True) for w, a in zip(weights[bucket], theirs, strict=True)]
            self._open = (bucket, self._exchanged + step, ours, theirs)
            self._close(weights, averages)

    def _close(self, weights: Sequence[Tensor], averages: dict[str, Tensor]) -> None:
        """Finish the open bucket; every line can be run again after an interruption."""
        if self._open is None:
            return
        bucket, exchanged, ours, theirs = self._open
        copy_(weights[bucket], theirs)
        averages.update(zip(self.names[bucket], ours, strict=True))
        self._exchanged = exchanged
        self._open = None


class Offload:
    """Averages in host memory: copies weights into pinned memory on its own CUDA stream during the next step.

    The average is updated when the copy is complete: at the next update, or when the average is read.
    """

    def __init__(self, names: list[str], parts: Sequence[Tensor]) -> None:
        self.names = names
        self._device = parts[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._pinned = [torch.empty_like(part, device="cpu", pin_memory=True) for part in parts]
        self._in_progress: tuple[torch.cuda.Event, list[Tensor], float] | None = None
        self._versions: list[tuple[Tensor, int]] = []

    @staticmethod
    def between(averages: Mapping[str, Tensor], parts: Sequence[Tensor]) -> Offload | None:
        """An Offload if all averages are on the host and all weights on CUDA; None otherwise."""
        apart = all(average.device.type == "cpu" for average in averages.values()) and all(p.is_cuda for p in parts)
        return Offload(list(averages), parts) if averages and apart else None

    @torch.no_grad()
    def start(self, averages: list[Tensor], parts: list[Tensor], fraction: float) -> None:
        """Begin ``average += fraction * (part - average)`` with the present values of the parts."""
        self.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(self._pinned, parts, non_blocking=True)
            self._in_progress = (self._stream.record_event(), averages, fraction)
        self._versions = [(part, part._version) for part in parts]

    def guard(self) -> None:
        """Let the device wait until the weights are copied, before they change.

        Raises:
            RuntimeError: If a weight has changed already.
        """
        if self._in_progress is None:
            return
        if any(part._version != version for part, version in self._versions):
            raise RuntimeError(
                'Averages with device="cpu" are copied while the forward pass runs, and a weight was written to in it.'
                " Use device=None for a module that changes its weights in the forward pass."
            )
        torch.cuda.current_stream(self._device).wait_event(self._in_progress[0])

    def synchronize(self) -> None:
        """Finish the update that is in progress."""
        if self._in_progress is None:
            return
        done, averages, fraction = self._in_progress
        if not done.query():  # the host waits only for a device that is a step behind
            done.synchronize()
        lerp_(averages, self._pinned, fraction)
        self._in_progress, self._versions = None, []
