"""The forward pass of a step, whole or in parts, with the backward pass of all parts but the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.callbacks.fits_memory.joining import (
    LogCall,
    joined_logs,
    joined_outputs,
    loss_in,
    with_loss,
    without_graph,
)
from lightning_tricks.core.batches.cutting import count_samples, micro_batches, naming_single_samples
from lightning_tricks.core.batches.form import require_no_attributes
from lightning_tricks.core.batches.paths import TARGETS, described, find, get, put, spelled
from lightning_tricks.core.lightning.trainer import scaled, unsynced
from lightning_tricks.core.mixed_targets.divisors import Count, Divisors, as_count, pass_count
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan, counted_targets
from lightning_tricks.core.mixed_targets.target import MixedTarget, mixed_target, returned_loss
from lightning_tricks.core.replay.own_batch import with_own_batch
from lightning_tricks.core.weights.gradients import GradientsBefore

PASS_COUNT = (
    f"{pass_count('FitsMemory')} A contrastive loss compares the samples of a batch with one another, so that the loss"
    " of a part is no part of it: use GradCacheMixin there."
)


@dataclass
class Forward:
    """All of a batch but the backward pass of its last part.

    Args:
        output: What ``training_step`` would return for the whole batch.
        logs: The calls of log for the whole batch.
        loss: The loss of the last part, weighted; None where there is nothing to train on.
        gradients: Those of the other parts, by weight.
        factor: The factor of these gradients, known once all parts have counted their targets.
    """

    output: Any
    logs: list[LogCall]
    loss: Tensor | None
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    factor: Tensor | None = None


@dataclass
class _Part:
    """The forward pass of a part of a batch."""

    output: Any  # what training_step has returned
    logs: list[LogCall]
    count: Tensor  # how many targets its loss is the mean of
    share: float  # of the samples


class StepInParts:
    """Runs training steps, whole or in parts.

    Args:
        trainer: The Trainer.
        count: Function of the batch that returns the number of targets of its loss; None to count them in the loss.
    """

    def __init__(self, trainer: L.Trainer, count: Count | None) -> None:
        self._trainer, self._count = trainer, count
        self.logs: list[LogCall] | None = None  # the calls of log of the step that runs now

    def run(self, run: partial[Any], size: int | None) -> Forward:
        """Run a step, in parts if its batch is larger than ``size``; ``.grad`` is as before.

        Args:
            run: The step, with its batch as the first argument.
            size: The largest number of samples of a part; None for whole batches.
        """
        if not self.cuts(run, size):
            with unsynced(self._trainer):
                output, logs = self._logging(with_own_batch(run))
            loss = returned_loss(loss_in(output))
            if not isinstance(loss, Tensor):
                return Forward(output, logs, None)
            return Forward(with_loss(output, loss.detach().requires_grad_()), logs, loss)
        assert size is not None, "it cuts"
        before = GradientsBefore(trained_weights(self._trainer.lightning_module))
        before.set_aside()
        try:
            return self._in_parts(run, size)
        finally:
            before.restore()

    def cuts(self, run: partial[Any], size: int | None) -> bool:
        """Whether the batch of a step is larger than a part."""
        return size is not None and count_samples(run.args[0], "FitsMemory") > size

    def _in_parts(self, run: partial[Any], size: int) -> Forward:
        module = self._trainer.lightning_module
        cut = micro_batches(run, size, "FitsMemory", "remove FitsMemory, and use a smaller batch")
        rule = f"FitsMemory gives {type(module).__name__} a part of one sample"
        parts: list[_Part] = []
        for number, (share, step) in enumerate(cut, 1):
            with unsynced(self._trainer):
                with naming_single_samples(rule, "choose a batch size that no half of which is odd, or another norm"):
                    part = self._part(step, share)
                parts.append(part)
                self._require_alike(part, parts[0])
                if (loss := loss_in(part.output)) is None:
                    continue
                if number == 1:  # about as many targets as the batch has, so that weights are about the shares
                    unit = part.count / share
                    unit = torch.where(unit > 0, unit, 1.0)
                loss = loss * (part.count / unit)
                if number < len(cut):
                    module.backward(scaled(self._trainer, loss))
                    part.output = without_graph(part.output)
                    del loss
        counts = [part.count for part in parts]
        output = joined_outputs([part.output for part in parts], counts, [part.share for part in parts])
        logs = joined_logs([part.logs for part in parts], counts)
        if loss_in(output) is None:
            return Forward(output, logs, None)
        total = torch.stack(counts).sum()
        factor = torch.where(total > 0, unit / total, 1.0)
        gradients = [(weight, weight.grad) for weight in trained_weights(module) if weight.grad is not None]
        return Forward(output, logs, loss * factor, gradients, factor)

    def _part(self, run: partial[Any], share: float) -> _Part:
        """Run a part of a batch, and count the targets of its loss."""
        module = self._trainer.lightning_module
        batch, plan = (run.args[0], None) if self._count else _planned(run.args[0])
        output, logs = self._logging(with_own_batch(partial(run.func, batch, *run.args[1:], **run.keywords)))
        if not isinstance(loss := returned_loss(loss_in(output)), Tensor):  # a batch that is skipped
            count = torch.full((), share, device=module.device)
        elif plan is None:
            assert self._count is not None, "or there is a plan"
            count = as_count(self._count(batch), loss.device)
        else:
            count = as_count(counted_targets(plan, "FitsMemory", type(module)), loss.device)
        if plan is not None:
            plan.divisors = None
        return _Part(with_loss(output, loss), logs, count, share)

    def _require_alike(self, part: _Part, first: _Part) -> None:
        losses = loss_in(part.output), loss_in(first.output)
        if (losses[0] is None) != (losses[1] is None):
            raise MisconfigurationException(
                "FitsMemory needs a loss of every part of a batch or of none, got None for one of them from"
                f" {type(self._trainer.lightning_module).__name__}.training_step: return one, or remove FitsMemory."
            )

    def _logging(self, run: Callable[[], Any]) -> tuple[Any, list[LogCall]]:
        """What a step returns, and what it logs."""
        logs: list[LogCall] = []
        self.logs = logs
        try:
            return run(), logs
        finally:
            self.logs = None


def trained_weights(module: nn.Module) -> list[nn.Parameter]:
    """The weights of a module that have gradients."""
    return [weight for weight in module.parameters() if weight.requires_grad]


def _planned(batch: Any) -> tuple[Any, LossPlan]:
    """A batch whose targets count by how many of them the means of losses are divided, and the plan that knows it."""
    paths = find(batch, TARGETS, 1)
    if not paths:
        raise MisconfigurationException(
            f"FitsMemory finds no targets in the batch, which has {described(batch)}. {PASS_COUNT}"
        )
    plans = [get(batch, path).plan for path in paths if isinstance(get(batch, path), MixedTarget)]
    plan = plans[0] if plans else LossPlan()
    if not plans:
        plan.only_looks, plan.tricks = True, "FitsMemory"
    for path in paths:
        if not isinstance(target := get(batch, path), MixedTarget):
            require_no_attributes(target, spelled(path), "FitsMemory")
            batch = put(batch, path, mixed_target([target], plan))
    plan.divisors, plan.remedy = Divisors(-100, of_parts=True), PASS_COUNT
    return batch, plan
