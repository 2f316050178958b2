"""Gradients of the mean over all targets of an accumulation window, in place of the mean of the batches' means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.batches.callback import EveryBatchCallback
from lightning_tricks.core.batches.paths import Path, described
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.trainer import data_parallel, has_comm_state, is_fitting
from lightning_tricks.core.mixed_targets.divisors import Count, Divisors, as_count, pass_count
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan, counted_targets
from lightning_tricks.core.weights.by_engine import local_gradients
from lightning_tricks.core.weights.gradients import require_dense
from lightning_tricks.core.weights.local import LocalWeights

__all__ = ["TokenMean"]

_PASS_COUNT = pass_count("TokenMean")


@final
class TokenMean(EveryBatchCallback):
    """Makes the gradient that of the mean over all targets of an accumulation window, however batches are padded.

    Lightning and DDP take the mean of the means of batches, ``sum_ir(g_ir) / (a * R)`` for a batches on each of R
    ranks, in which a target of a short batch counts more than one of a long batch, and a short last window less than
    the others. With n_ir targets in a batch it becomes ``sum_ir(n_ir * g_ir) / sum_ir(n_ir)``, the gradient of one
    large batch. The loss itself, in logs and metrics, is not changed. Where all batches of a window have as many
    targets as one another, training is bit for bit as without it, but for the short last window.

    Targets are counted where the training step computes its loss from the targets of the batch: by the losses of
    ``torch.nn.functional`` that are means, which leave out ``ignore_index`` and weigh classes, or a ``mean()`` of
    their losses of entries. Several losses must be means of as many targets. For any other loss pass ``count``.

    A batch's gradient is weighted by its targets relative to the window's first batch. At the end of the window, before
    all clips, gradients are divided by the targets of all batches and ranks, which are added up then.

    Args:
        count: Function of the batch that returns the number of targets that its loss is the mean of, at least 0; None
            to count those of the loss.
        ignore_index: The label that does not count. A loss of torch that is told another one knows better, as long as
            this is the usual -100.

    Raises:
        TypeError: For a value of the wrong type.
        MisconfigurationException: At setup, in manual optimization, under DeepSpeed and with a communication hook of
            DDP that has a state; in the first step, if the targets of the loss cannot be counted.

    Example:
        >>> trainer = L.Trainer(callbacks=[TokenMean()], accumulate_grad_batches=4, accelerator="cpu", logger=False)
    """

    order = 2  # after what leaves samples out
    only_looks = True
    needs_step_hooks = True
    conflicts = (
        Conflict(
            ("SAMHooks",),
            "the targets of a full batch are counted, but micro_batch_size takes the mean over those of its parts",
            "Remove micro_batch_size",
            lambda trick, hooks: hooks.sam.micro_batch_size is not None,
        ),
        Conflict(
            ("HardExampleFilter",),
            "with across_ranks the loss is no mean over the samples that a rank has kept",
            "Remove across_ranks",
            lambda trick, other: other.across_ranks,
        ),
        Conflict(("TokenMean",), "the second one would weigh the batches once more"),
    )

    def __init__(self, count: Count | None = None, *, ignore_index: int = -100) -> None:
        if count is not None and not callable(count):
            raise TypeError(f"count must be a function of the batch or None, got {count!r}.")
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TypeError(f"ignore_index must be an integer, got {ignore_index!r}.")
        super().__init__()
        self.count, self.ignore_index = count, ignore_index
        # The same in a run that is resumed, whose function is another object.
        self._key = "TokenMean" if count is None else "TokenMean(count)"
        self._weights: LocalWeights | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin a window."""
        self._plan: LossPlan | None = None  # of the present batch, if its loss tells the number of targets
        self._here: Tensor | None = None  # the number of targets in the present batch
        self._counted: Tensor | None = None  # those of the window's batches, on this rank
        self._unit: Tensor | None = None  # those of the window's first batch, the mean over the ranks

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._forget()
        if not is_fitting(trainer):
            return
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"TokenMean weighs the batches of Trainer(accumulate_grad_batches=...), got"
                f" {type(pl_module).__name__}.automatic_optimization=False, which decides by itself what a step is the"
                " mean of: divide by the number of targets there, or remove TokenMean."
            )
        if has_comm_state(trainer):
            raise MisconfigurationException(
                f"TokenMean needs the mean of the ranks' gradients, got {type(trainer.strategy).__name__} with a"
                " communication hook that has a state (PowerSGD, local SGD): leave the hook out, or remove TokenMean."
            )
        self._weights = local_gradients(trainer, pl_module, "TokenMean")
        self._undo.callback(setattr, self, "_weights", None)
        self._wrap(pl_module, "training_step", partial(self._step, trainer))
        self._wrap(trainer.strategy, "optimizer_step", partial(self._optimizer_step, trainer))

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:  # where Lightning sets gradients to zero
            self._counted = self._unit = None

    @override
    def _begin(self) -> None:
        self._plan = self._here = None

    @override
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        if self.count is not None:
            self._here = as_count(self.count(context.batch), trainer.strategy.root_device)
            return
        self._plan = context.plan
        self._plan.divisors, self._plan.remedy = Divisors(self.ignore_index), _PASS_COUNT
        context.plan_targets(self, self.targets_in(context.batch))

    @override
    def targets_in(self, batch: Any) -> list[Path]:
        paths = self.targets_if_any(batch)
        if not paths:
            raise MisconfigurationException(
                f"TokenMean finds no targets in the batch, which has {described(batch)}. {_PASS_COUNT}"
            )
        self._require_replaceable(batch, paths)
        return paths

    def _step(self, trainer: L.Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step, and let the gradient of its loss count as its targets do."""
        if self._plan is not None:
            self._plan.divisors = Divisors(self.ignore_index)  # SAM runs the step twice
        output = original(*args, **kwargs)
        if (self._plan is None and self._here is None) or not torch.is_grad_enabled():
            return output  # a trial
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        if getattr(loss, "unclear", ""):
            return output  # which is refused
        with torch._C.DisableTorchFunctionSubclass():
            counts = isinstance(loss, Tensor) and loss.requires_grad
        if not counts:  # a batch that is skipped
            self._here = torch.zeros((), device=trainer.strategy.root_device)
        elif self._plan is not None:
            self._here = as_count(counted_targets(self._plan, "TokenMean", type(trainer.lightning_module)), loss.device)
        weight = self._weight(trainer)  # in which all ranks take part
        if counts:
            loss.register_hook(lambda gradient: gradient * weight.to(gradient.dtype))
        return output

    def _weight(self, trainer: L.Trainer) -> Tensor:
        """How much the present batch counts, relative to the first one of the window."""
        assert self._here is not None, "just counted"
        if self._unit is None:
            mean = _sum_of_ranks(trainer, self._here) / trainer.world_size
            self._unit = torch.where(mean > 0, mean, 1.0)
        return self._here / self._unit

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        if self._here is not None:
            self._counted = self._here if self._counted is None else self._counted + self._here

    def _optimizer_step(
        self,
        trainer: L.Trainer,
        original: Callable[..., Any],
        optimizer: Optimizer,
        closure: Any,
        *args: Any,
        **rest: Any,
    ) -> Any:
        """Step by gradients that are divided before any hook looks at them."""

        def divided() -> Any:
            result = closure()
            self._divide(trainer, optimizer)
            return result

        return original(optimizer, divided, *args, **rest)

    @torch.no_grad()
    def _divide(self, trainer: L.Trainer, optimizer: Optimizer) -> None:
        """Divide gradients by the targets of all batches and ranks, in place of the number of batches and ranks."""
        batches, unit, counted = trainer.accumulate_grad_batches, self._unit, self._counted
        self._counted = None
        if batches == 1 or unit is None:  # a window of one batch has the weights of its ranks already
            return
        assert self._weights is not None, "set up"
        counted = torch.zeros_like(unit) if counted is None else counted
        total = _sum_of_ranks(trainer, counted) * (data_parallel(trainer)[1] / trainer.world_size)
        factor = batches * data_parallel(trainer)[1] * unit / total
        factor = torch.where(total > 0, factor, 1.0)
        found = [p for p in weights_of(optimizer) if p.grad is not None]
        require_dense(trainer.lightning_module, [(p, p.grad) for p in found], "TokenMean")
        parts = self._weights.parts(p.grad for p in found)
        for device in {part.device for part in parts}:
            torch._foreach_mul_([part for part in parts if part.device == device], factor.to(device))


def _sum_of_ranks(trainer: L.Trainer, number: Tensor) -> Tensor:
    """The sum of a number over all processes."""
    if trainer.world_size == 1:
        return number
    dist.all_reduce(total := number.clone())  # strategy.reduce would wait for the devices of all ranks
    return total
