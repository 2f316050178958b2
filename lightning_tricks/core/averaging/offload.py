"""Averages in host memory of weights on a CUDA device, without the device waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_tricks.core.weights.tensors import lerp_


class Offload:
    """Copies weights into pinned memory on a stream of its own, while the device goes on with the next step.

    The average moves when the copy has arrived: at the next update, or when somebody asks for it.
    """

    def __init__(self, names: list[str], parts: Sequence[Tensor]) -> None:
        self.names = names
        self._device = parts[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._pinned = [torch.empty_like(part, device="cpu", pin_memory=True) for part in parts]
        self._under_way: tuple[torch.cuda.Event, list[Tensor], float] | None = None
        self._versions: list[tuple[Tensor, int]] = []

    @staticmethod
    def between(averages: Mapping[str, Tensor], parts: Sequence[Tensor]) -> Offload | None:
        """An Offload if the averages are on the host and all weights on CUDA."""
        apart = all(average.device.type == "cpu" for average in averages.values()) and all(p.is_cuda for p in parts)
        return Offload(list(averages), parts) if averages and apart else None

    @torch.no_grad()
    def start(self, averages: list[Tensor], parts: list[Tensor], fraction: float) -> None:
        """Begin ``average += fraction * (part - average)`` with the present values of the parts."""
        self.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(self._pinned, parts, non_blocking=True)
            self._under_way = (self._stream.record_event(), averages, fraction)
        self._versions = [(part, part._version) for part in parts]

    def guard(self) -> None:
        """Let the device wait until the weights are copied, before they change.

        Raises:
            RuntimeError: If they have changed already.
        """
        if self._under_way is None:
            return
        if any(part._version != version for part, version in self._versions):
            raise RuntimeError(
                'Averages with device="cpu" are copied while the forward pass runs, and a weight was written to in it.'
                " Use device=None for a module that changes its weights in the forward pass."
            )
        torch.cuda.current_stream(self._device).wait_event(self._under_way[0])

    def synchronize(self) -> None:
        """Finish the update that is under way."""
        if self._under_way is None:
            return
        done, averages, fraction = self._under_way
        done.synchronize()
        lerp_(averages, self._pinned, fraction)
        self._under_way, self._versions = None, []
