"""Gradient clipping at a percentile of the gradient norms so far."""

from __future__ import annotations

import math
from typing import Any, final

import lightning.pytorch as pl
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
    if not history.is_cpu:
        return torch.nanquantile(history, percentile / 100)  # no CUDA sync
    ordered, counted = history.flatten().sort().values, int(torch.count_nonzero(history == history))  # NaN is last
    place = (counted - 1) * (percentile / 100)
    below = math.floor(place)
    return torch.lerp(ordered[below], ordered[math.ceil(place)], place - below)


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
    if norm.is_cpu and limit.is_cpu:  # numbers take less time than operations on small tensors
        size, largest = norm.item(), limit.item()
        if largest < size < math.inf:
            torch._foreach_mul_(gradients, largest / size)
        return
    # No CUDA sync: inf - inf is NaN, for which fmin returns the 1.
    factor = torch.fmin(limit / (norm - norm + norm), torch.ones_like(norm))
    torch._foreach_mul_(gradients, factor)


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
        >>> trainer = pl.Trainer(callbacks=[AutoClip(percentile=10)], accelerator="cpu", logger=False)

    References:
        Seetharaman et al., AutoClip: Adaptive Gradient Clipping for Source Separation Networks, arXiv 2007.14469.
    """

    def __init__(self, percentile: float = 10, *, history: int | None = 1000) -> None:
        check_range("percentile", percentile, 0, 100)
        if history is not None:
            check_count("history", history)
        super().__init__()
        self.percentile = percentile
        self.history = history
        self._norms: dict[int, Tensor] = {}  # by the optimizer's number, the oldest norm first
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # norm and clip value of the last step

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._norms, self._last = {}, {}

    @override
    def _change(
        self, trainer: pl.Trainer, optimizer: Optimizer, parameters: list[nn.Parameter], weights: LocalWeights
    ) -> None:
        number = optimizer_number(trainer, optimizer)
        gradients = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
        parts = [part for gradient in gradients if (part := weights.local(gradient)) is not None]
        norm = weights.norm(parts, of=gradients)
        known = norm if norm.is_cpu and math.isfinite(norm) else norm - norm + norm  # inf - inf is NaN
        known = known.reshape(1)
        if number in self._norms:
            known = torch.cat([self._norms[number].to(known), known])
        self._norms[number] = known if self.history is None else known[-self.history :]
        limit = clip_value(self._norms[number], self.percentile)
        self._last[number] = norm, limit
        scale_down_(parts, norm, limit)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._last:
            log_every_n_steps(trainer, self._metrics)

    def _metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for number, (norm, limit) in self._last.items():
            suffix = f"_{number}" if number else ""
            metrics |= {f"tricks/grad_norm{suffix}": float(norm), f"tricks/clip_value{suffix}": float(limit)}
        return metrics

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"norms": {number: norms.to("cpu", copy=True) for number, norms in self._norms.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._norms = dict(state_dict["norms"])
