"""What the ranks know together of losses and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks.core.checks import some
from lightning_tricks.core.finite import all_finite, names_of_nonfinite
from lightning_tricks.core.trainer import grad_scaler


def true_loss(trainer: pl.Trainer, loss: Tensor) -> Tensor:
    """What the training step returned, of a loss that Lightning has divided and scaled for its backward pass."""
    scaler, loss = grad_scaler(trainer), loss.detach()
    loss = loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))
    return loss * trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else loss


class FiniteWatch:
    """Looks at the losses of a window and at the gradients that they have left; waits for the device once a step."""

    def __init__(self) -> None:
        self._losses: Tensor | None = None  # whether those of the window are finite
        self._last: Tensor | None = None  # finite loss

    def note(self, trainer: pl.Trainer, loss: Tensor) -> None:
        """Look at a loss before its backward pass, without waiting for the device."""
        loss = true_loss(trainer, loss)
        finite = loss.isfinite()
        self._losses = finite if self._losses is None else self._losses & finite
        self._last = torch.where(finite, loss, torch.nan if self._last is None else self._last)

    def forget(self) -> None:
        """Begin a new window: nobody has asked about the one before, whose step somebody else has left out."""
        self._losses = None

    def finite(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> bool:
        """Whether the losses since the last time and the optimizers' gradients are finite on every rank; all ask."""
        good = all_finite(_gradients(optimizers)).to(trainer.strategy.root_device)
        good = good if self._losses is None else good & self._losses.to(good.device)
        self._losses = None
        if trainer.world_size > 1:
            wrong = (~good).float()
            dist.all_reduce(wrong, dist.ReduceOp.MAX)
            return not wrong.item()
        return bool(good)

    def report(self, trainer: pl.Trainer, module: pl.LightningModule) -> str:
        """Parameters with gradients that are not finite, on any rank, and the last finite loss; all ranks ask."""
        gradients = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
        every = [names_of_nonfinite(gradients)] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(every, every[0])
        names = list(dict.fromkeys(name for each in every for name in each))
        loss = "the loss, of which every gradient is finite" if gradients else "the loss"
        which = f"the gradients of {some(names)}" if names else loss
        last = "none" if self._last is None or self._last.isnan() else f"{self._last.item():.6g}"
        return f"not finite: {which}; last finite loss: {last}"


def _gradients(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    weights = (weight for group in groups for weight in group["params"])
    return [weight.grad for weight in weights if weight.grad is not None]
