"""Whether losses and gradients are finite, with as few waits for the device as possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.trainer import grad_scaler
from lightning_tricks.core.weights.tensors import local_part


def all_finite(tensors: Sequence[Tensor]) -> bool | Tensor:
    """Whether all entries of all tensors are finite; every tensor is read once.

    Args:
        tensors: Floating-point or complex tensors, dense or sparse; only this rank's shards of DTensors are checked.

    Returns:
        A bool if all tensors are on the CPU, else a boolean scalar on the device of the first tensor.

    Example:
        >>> all_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])
        False
    """
    parts = list(map(_dense_real, tensors))
    known = all(_finite(part) for part in parts if part.is_cpu)  # needs no wait
    there = [part for part in parts if not part.is_cpu and part.numel()]
    if not there:
        return known
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in there) else torch.float32
    largest = torch._foreach_norm(there, float("inf"))  # one kernel on a GPU; on CPU this is ten times slower
    # The infinity norm of a tensor with a NaN is NaN.
    finite = torch.stack([norm.to(there[0].device, dtype) for norm in largest]).isfinite().all()
    return (finite & known).to(parts[0].device)


def nonfinite_names(named: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors with an entry that is not finite."""
    return [name for name, tensor in named.items() if not all_finite([tensor])]


def _finite(part: Tensor) -> bool:
    # A sum is the fastest reading on CPU, and finite only if all terms are. If it overflows, the extremes decide.
    total = part.sum() if part.ndim else part
    return math.isfinite(total.item()) or all(math.isfinite(extreme.item()) for extreme in torch.aminmax(part))


def _dense_real(tensor: Tensor) -> Tensor:
    tensor = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def true_loss(trainer: L.Trainer, loss: Tensor) -> Tensor:
    """A copy of the loss that the training step returned, from the loss that Lightning has divided and scaled."""
    scaler, loss = grad_scaler(trainer), loss.detach()
    loss = loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))
    factor = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
    return loss.clone() if factor == 1 else loss * factor


class FiniteCheck:
    """Checks the losses and gradients of an accumulation window; waits for the device once per optimizer step."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []  # the losses of the window so far
        self._last: Tensor | None = None  # the last finite loss, or the first one if none was finite

    def note(self, trainer: L.Trainer, loss: Tensor) -> Tensor:
        """Keep a copy of a loss before its backward pass, without waiting for the device."""
        self._losses.append(true_loss(trainer, loss))
        return self._losses[-1]

    def forget(self) -> None:
        """Begin a new window, also if the last one was never checked because another callback left out its step."""
        self._note_last()
        self._losses = []

    def finite(self, trainer: L.Trainer, optimizers: Sequence[Optimizer]) -> bool:
        """Whether the losses since the last call and the gradients are finite on all ranks; all ranks take part."""
        return self.finite_and_mean(trainer, optimizers)[0]

    def finite_and_mean(
        self, trainer: L.Trainer, optimizers: Sequence[Optimizer], numbers: Sequence[Tensor] = ()
    ) -> tuple[bool, list[float]]:
        """The same, and the means of scalars over the ranks, in one wait for the device."""
        good = all_finite([*_gradients(optimizers), *self._losses])
        device = trainer.strategy.root_device
        wrong = torch.full((), not good, device=device) if isinstance(good, bool) else ~good
        dtype = torch.float64 if any(number.dtype == torch.float64 for number in numbers) else torch.float32
        all_of_them = torch.stack([each.to(device, dtype) for each in (wrong, *numbers)])
        if trainer.world_size > 1:
            dist.all_reduce(all_of_them)
        ranks_with_wrong, *sums = all_of_them.tolist()
        self.forget()
        return not ranks_with_wrong, [total / trainer.world_size for total in sums]

    def _note_last(self) -> None:
        for loss in self._losses:
            self._last = loss if self._last is None else torch.where(loss.isfinite(), loss, self._last)

    def report(self, trainer: L.Trainer, module: L.LightningModule) -> str:
        """A text with the parameters whose gradients are not finite, and the last finite loss; all ranks take part."""
        self._note_last()
        gradients = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
        every = [nonfinite_names(gradients)] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(every, every[0])
        names = list(dict.fromkeys(name for of_rank in every for name in of_rank))
        loss = "the loss, of which every gradient is finite" if gradients else "the loss"
        which = f"the gradients of {some(names)}" if names else loss
        number = math.nan if self._last is None else self._last.item()
        last = f"{number:.6g}" if math.isfinite(number) else "none"
        return f"not finite: {which}; last finite loss: {last}"


def _gradients(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    weights = [weight for optimizer in optimizers for weight in weights_of(optimizer)]
    return [weight.grad for weight in weights if weight.grad is not None]
