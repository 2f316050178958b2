"""Whether numbers are finite, asked without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.trainer import grad_scaler
from lightning_tricks.core.weights.tensors import local_part


def all_finite(tensors: Sequence[Tensor]) -> bool | Tensor:
    """Whether no tensor has an infinite or undefined entry: one reading of each.

    Args:
        tensors: Floating-point or complex tensors, dense or sparse; of DTensors this rank's part is looked at.

    Returns:
        A bool, or a boolean scalar on the device of the first tensor if one is on another device than the CPU.

    Example:
        >>> all_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])
        False
    """
    parts = list(map(_plain, tensors))
    known = all(_finite(part) for part in parts if part.is_cpu)  # nothing to wait for
    there = [part for part in parts if not part.is_cpu and part.numel()]
    if not there:
        return known
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in there) else torch.float32
    largest = torch._foreach_norm(there, float("inf"))  # one kernel, but on CPU it is ten times slower
    # undefined entries make all of these undefined
    finite = torch.stack([each.to(there[0].device, dtype) for each in largest]).isfinite().all()
    return (finite & known).to(parts[0].device)


def nonfinite_names(named: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors with an infinite or undefined entry."""
    return [name for name, tensor in named.items() if not all_finite([tensor])]


def _finite(part: Tensor) -> bool:
    # a sum is the fastest reading on CPU; it is finite of finite terms only, but may overflow, and extremes cannot
    total = part.sum() if part.ndim else part
    return math.isfinite(total.item()) or all(math.isfinite(each.item()) for each in torch.aminmax(part))


def _plain(tensor: Tensor) -> Tensor:
    tensor = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def true_loss(trainer: pl.Trainer, loss: Tensor) -> Tensor:
    """A copy of what the training step returned, of a loss that Lightning has divided and scaled since."""
    scaler, loss = grad_scaler(trainer), loss.detach()
    loss = loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))
    factor = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
    return loss.clone() if factor == 1 else loss * factor


class FiniteCheck:
    """Looks at the losses of a window and at the gradients that they have left; waits for the device once a step."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []  # of the window
        self._last: Tensor | None = None  # finite loss

    def note(self, trainer: pl.Trainer, loss: Tensor) -> Tensor:
        """Keep a copy of a loss before its backward pass, without waiting for the device."""
        self._losses.append(true_loss(trainer, loss))
        return self._losses[-1]

    def forget(self) -> None:
        """Begin a new window: nobody has asked about the one before, whose step somebody else has left out."""
        self._note_last()
        self._losses = []

    def finite(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> bool:
        """Whether the losses since the last time and the optimizers' gradients are finite on every rank; all ask."""
        good = all_finite([*_gradients(optimizers), *self._losses])
        if trainer.world_size > 1:
            wrong = (~torch.as_tensor(good, device=trainer.strategy.root_device)).float()
            dist.all_reduce(wrong, dist.ReduceOp.MAX)
            good = ~wrong.bool()
        answer = bool(good)
        if answer and self._losses:
            self._last, self._losses = self._losses[-1], []
        else:
            self.forget()
        return answer

    def _note_last(self) -> None:
        finite = [loss for loss in self._losses if loss.isfinite()]
        self._last = finite[-1] if finite else self._last

    def report(self, trainer: pl.Trainer, module: pl.LightningModule) -> str:
        """Parameters with gradients that are not finite, on any rank, and the last finite loss; all ranks ask."""
        self._note_last()
        gradients = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
        every = [nonfinite_names(gradients)] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(every, every[0])
        names = list(dict.fromkeys(name for each in every for name in each))
        loss = "the loss, of which every gradient is finite" if gradients else "the loss"
        which = f"the gradients of {some(names)}" if names else loss
        last = "none" if self._last is None else f"{self._last.item():.6g}"
        return f"not finite: {which}; last finite loss: {last}"


def _gradients(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]
