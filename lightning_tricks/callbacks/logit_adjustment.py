"""Logit adjustment in any module: the labels of the training data are counted, and its cross-entropy is changed."""

from __future__ import annotations

from typing import Any, final

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.callback import EveryBatchCallback
from lightning_tricks.core.batches.paths import Names, get, spelled
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_range
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.loaders import batches_before_training
from lightning_tricks.core.lightning.trainer import extremes
from lightning_tricks.core.mixed_targets.divisors import Loss
from lightning_tricks.core.replay.trial import trial_steps
from lightning_tricks.losses.logit_adjustment import adjusted_logits

__all__ = ["LogitAdjustment"]


@final
class LogitAdjustment(EveryBatchCallback):
    """Trains on logit-adjusted cross-entropy: ``F.cross_entropy(logits + tau * log(prior), y)``, as the module has it.

    The prior is the share of each class among the labels of the training data. They are counted before the first step,
    in one pass over the training loader without a step of the module, over all ranks; a fit that is resumed has the
    counts of its checkpoint. Validation and prediction have plain logits, whose ``argmax`` is balanced over classes.
    ``F.nll_loss`` of logarithms of probabilities is changed alike. A loss that is logged in the training step is that
    of the adjusted logits.

    Args:
        tau: How much of the imbalance is taken out, at least 0; 0 changes nothing.
        target: Key, index or path (such as "batch.1") of the labels, integers of any shape, of which negative ones and
            the ``ignore_index`` of the loss are no class; None to find them in pairs and under usual names.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start, for a training loader without a length, or labels that are no integers;
            in the first step, for another loss of the labels, or if it has fewer classes than there are labels.

    Example:
        >>> trainer = L.Trainer(callbacks=[LogitAdjustment()], accelerator="cpu", logger=False)

    References:
        Menon et al., Long-tail Learning via Logit Adjustment, ICLR 2021, arXiv 2007.07314.
    """

    order = -1  # before samples are compared by their losses
    conflicts = (Conflict(("LogitAdjustment",), "the second one would adjust the logits again"),)

    def __init__(self, *, tau: float = 1.0, target: Names = None) -> None:
        check_range("tau", tau, 0.0)
        self.tau, self.target = tau, target
        super().__init__()
        self._context: BatchContext | None = None
        self._forget()

    def _forget(self) -> None:
        """Count anew."""
        self.counts: list[int] = []  # the number of training labels of each class, as far as there are labels
        self._priors: dict[Any, Tensor] = {}  # the same on a device, with an entry for each class of a loss

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._forget()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self.counts:  # those of a checkpoint
            return
        found = torch.zeros(0, dtype=torch.long, device=trainer.strategy.root_device)
        with trial_steps(trainer, pl_module, deep=True):
            for batch in batches_before_training(trainer, pl_module, "LogitAdjustment"):
                found = _added(found, torch.bincount(self._labels(batch)).to(found.device))
        self.counts = _sum_of_ranks(trainer, found)

    def _labels(self, batch: Any) -> Tensor:
        """The labels of a batch (N,).

        Raises:
            MisconfigurationException: For several targets, or one that is not of labels.
        """
        path, *others = self.targets_in(batch)
        labels = get(batch, path)
        if others or labels.is_floating_point() or labels.dtype == torch.bool:
            got = f"{1 + len(others)} targets" if others else f"{labels.dtype} for {spelled(path)}"
            raise MisconfigurationException(
                f"LogitAdjustment counts the labels of one target, integers, got {got}: name one in target=, or compute"
                " logit_adjustment(logits, targets, prior) in the training step."
            )
        return labels[labels >= 0].flatten()

    @override
    def _begin(self) -> None:
        self._context = None

    @override
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        self._context, context.plan.change_arguments = context, self._adjusted
        context.plan_targets(self, self.targets_in(context.batch))

    def _adjusted(self, func: Loss, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a loss with adjusted logits."""
        assert self._context is not None, "of this batch"
        name, logits = next(iter(call.items()))
        grad = torch.is_grad_enabled()
        if func.__name__ not in ("cross_entropy", "nll_loss"):
            if grad and any(isinstance(value, Tensor) and value.requires_grad for value in call.values()):
                raise self._context.plan.refusal(
                    f"{func.__name__}() of the target has no logits of classes: compute F.cross_entropy, or name"
                    " another target."
                )
            return call
        if logits.requires_grad != grad:  # it is only logged; in a trial nothing has a gradient
            return call
        dim = min(logits.ndim - 1, 1)
        adjusted = adjusted_logits(logits, self._prior(call, logits.shape[dim], logits.device), self.tau, dim)
        return {**call, name: adjusted.log_softmax(dim) if func.__name__ == "nll_loss" else adjusted}

    def _prior(self, call: dict[str, Any], classes: int, device: torch.device) -> Tensor:
        """The number of training labels of each class of a loss (C,)."""
        ignored = call["ignore_index"]
        if (prior := self._priors.get((classes, ignored, device))) is None:
            counts = [0 if label == ignored else count for label, count in enumerate(self.counts)]
            if any(counts[classes:]) or not any(counts):
                raise MisconfigurationException(
                    f"LogitAdjustment has counted training labels up to {len(counts) - 1}, and the loss has {classes}"
                    " classes: name in target= the labels that the loss gets, or compute logit_adjustment(logits,"
                    " targets, prior) in the training step."
                )
            counts = [*counts[:classes], *[0] * (classes - len(counts))]
            prior = self._priors[classes, ignored, device] = torch.tensor(counts, dtype=torch.float32, device=device)
        return prior

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counts": self.counts}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.counts = state_dict["counts"]


def _added(one: Tensor, other: Tensor) -> Tensor:
    """The sum of counts of unequal length."""
    longest = max(len(one), len(other))
    return F.pad(one, (0, longest - len(one))) + F.pad(other, (0, longest - len(other)))


def _sum_of_ranks(trainer: L.Trainer, counts: Tensor) -> list[int]:
    """The counts of all processes, which have seen labels of their own."""
    longest = extremes(trainer, len(counts))[1]
    counts = F.pad(counts, (0, longest - len(counts)))
    return trainer.strategy.reduce(counts, reduce_op="sum").tolist() if trainer.world_size > 1 else counts.tolist()
