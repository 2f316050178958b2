"""Gradient clipping at a percentile of the gradient norms so far."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Any, final

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.lightning.trainer import log_every_n_steps, optimizer_number
from lightning_tricks.core.weights.gradients import GradientCallback
from lightning_tricks.core.weights.local import LocalWeights

__all__ = ["AutoClip"]


def clip_value(history: Tensor, percentile: float) -> Tensor:
    """A percentile of the norms in the history, with linear interpolation as in NumPy; NaN for an empty history.

    Args:
        history: Gradient norms (n,), NaN for norms that do not count.
        percentile: The percentile, in [0, 100].

    Raises:
        ValueError: For a percentile out of range.

    Example:
        >>> clip_value(torch.tensor([4.0, 1.0, float("nan"), 2.0]), 50)
        tensor(2.)
    """
    check_range("percentile", percentile, 0, 100)
    return torch.nanquantile(history, percentile / 100)  # no CUDA sync


@torch.no_grad()
def scale_down_(gradients: list[Tensor], norm: Tensor, limit: Tensor) -> None:
    """Multiply gradients by ``min(1, limit / norm)``; a norm that is not finite leaves them unchanged.

    Args:
        gradients: The gradients, which are changed in place.
        norm: The norm of the gradients, a scalar.
        limit: The largest norm that is not clipped, a scalar.

    Example:
        >>> gradient = torch.tensor([3.0, 4.0])
        >>> scale_down_([gradient], torch.tensor(5.0), torch.tensor(2.5))
        >>> gradient
        tensor([1.5000, 2.0000])
    """
    # No CUDA sync: inf - inf is NaN, for which fmin returns the 1.
    factor = torch.fmin(limit / (norm - norm + norm), torch.ones_like(norm))
    torch._foreach_mul_(gradients, factor)


class NormHistory:
    """The last gradient norms as numbers, which take a fraction of the time of small tensors; for those on a CPU.

    Args:
        norms: The norms so far, the oldest first; NaN for norms that do not count.
        length: The number of last norms that count; None for all.
    """

    def __init__(self, norms: Iterable[float], length: int | None) -> None:
        self.norms = deque(norms, length)
        self._ordered = sorted(norm for norm in self.norms if math.isfinite(norm))

    def add(self, norm: float) -> None:
        """Add the norm of a step, in place of the oldest one if there are enough."""
        if len(self.norms) == self.norms.maxlen and (oldest := self.norms[0]) == oldest:
            del self._ordered[bisect_left(self._ordered, oldest)]
        if not math.isfinite(norm):
            self.norms.append(math.nan)
            return
        self.norms.append(norm)
        insort(self._ordered, norm)

    def value(self, percentile: float) -> float:
        """``clip_value`` of the norms."""
        if not self._ordered:
            return math.nan
        place = (len(self._ordered) - 1) * (percentile / 100)
        low, high = self._ordered[math.floor(place)], self._ordered[math.ceil(place)]
        return low + (high - low) * (place % 1)


@final
class AutoClip(GradientCallback):
    """Gradient clipping that finds its own threshold: a percentile of the gradient norms so far.

    ``g <- g * min(1, c_t / ||g||)`` with ``c_t`` the percentile of ``||g_1||, ..., ||g_t||``, the norms of all
    optimizer steps up to this one, before clipping. Norms that are not finite do not count, and such gradients are not
    changed. The norm is over all parameters of an optimizer and the shards of all ranks, of accumulated and unscaled
    gradients. Every optimizer has its own history, which checkpoints contain. The Trainer's ``gradient_clip_val`` clips
    afterwards. ``tricks/grad_norm`` and ``tricks/clip_value`` are logged every ``log_every_n_steps``, with the
    optimizer's number if it is not the first.

    Args:
        percentile: The percentile, in [0, 100]; 100 clips nothing.
        history: The number of last steps that count; None for all steps, as in the paper, which takes ever longer.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, under a strategy that owns the gradients (DeepSpeed, FSDP1); in the first
            step, for a fused optimizer under fp16.

    Example:
        >>> trainer = L.Trainer(callbacks=[AutoClip(percentile=10)], accelerator="cpu", logger=False)

    References:
        Seetharaman et al., AutoClip: Adaptive Gradient Clipping for Source Separation Networks, arXiv 2007.14469.
    """

    def __init__(self, percentile: float = 10, *, history: int | None = 1000) -> None:
        check_range("percentile", percentile, 0, 100)
        check_count("history", history, optional=True)
        super().__init__()
        self.percentile = percentile
        self.history = history
        self._norms: dict[int, NormHistory | Tensor] = {}  # by the optimizer's number
        self._last: dict[int, tuple[float | Tensor, float | Tensor]] = {}  # norm and clip value of the last step

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._norms, self._last = {}, {}

    @override
    def _change(
        self, trainer: L.Trainer, optimizer: Optimizer, parameters: list[nn.Parameter], weights: LocalWeights
    ) -> None:
        number = optimizer_number(trainer, optimizer)
        gradients = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
        parts = weights.parts(gradients)
        norm = weights.norm(parts, of=gradients)
        if norm.is_cpu:
            self._clip_by_numbers(number, parts, norm.item())
        else:
            self._clip_on_device(number, parts, norm)

    def _clip_by_numbers(self, number: int, parts: list[Tensor], norm: float) -> None:
        known = self._norms.get(number)
        if not isinstance(known, NormHistory):
            known = self._norms[number] = NormHistory([] if known is None else known.tolist(), self.history)
        known.add(norm)
        limit = known.value(self.percentile)
        self._last[number] = norm, limit
        if limit < norm < math.inf:
            torch._foreach_mul_(parts, limit / norm)

    def _clip_on_device(self, number: int, parts: list[Tensor], norm: Tensor) -> None:
        known = self._norms.get(number)
        assert not isinstance(known, NormHistory), "the weights of an optimizer stay on their device"
        counted = (norm - norm + norm).reshape(1)  # inf - inf is NaN
        known = counted if known is None else torch.cat([known.to(norm, non_blocking=True), counted])
        first = 0 if self.history is None else max(0, len(known) - self.history)  # XLA slices within the length only
        self._norms[number] = known = known[first:]
        limit = clip_value(known, self.percentile)
        self._last[number] = norm, limit
        scale_down_(parts, norm, limit)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._last:
            log_every_n_steps(trainer, self._metrics)

    def _metrics(self) -> dict[str, float | Tensor]:
        metrics: dict[str, float | Tensor] = {}
        for number, (norm, limit) in self._last.items():
            suffix = f"_{number}" if number else ""
            metrics |= {f"tricks/grad_norm{suffix}": norm, f"tricks/clip_value{suffix}": limit}
        return metrics

    @override
    def state_dict(self) -> dict[str, Any]:
        norms = {
            number: torch.tensor(known.norms, dtype=torch.float64, device="cpu")
            if isinstance(known, NormHistory)
            else known.to("cpu", copy=True)
            for number, known in self._norms.items()
        }
        return {"norms": norms}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._norms = dict(state_dict["norms"])
