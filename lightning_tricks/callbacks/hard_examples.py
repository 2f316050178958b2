"""Training on hard examples: the samples with the largest losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, final

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.callback import BatchCallback
from lightning_tricks.core.batches.cutting import Samples, naming_single_samples, select_samples
from lightning_tricks.core.batches.paths import Names, other_samples, spelled
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.batches.scoring import per_sample_losses, shrunk
from lightning_tricks.core.checks import check_bool, check_choice, check_count, check_range
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.trainer import data_parallel, is_fitting, later_extremes, log_every_n_steps
from lightning_tricks.core.mixed_targets.loss_plan import Choose
from lightning_tricks.core.replay.rerun import is_replaying, run_number
from lightning_tricks.core.replay.trial import WithoutGradients

__all__ = ["HardExampleFilter", "ohem_loss"]


def ohem_loss(losses: Tensor, keep: float) -> Tensor:
    """Online hard example mining: the mean of the k largest losses, ``k = max(1, round(keep * n))``.

    Args:
        losses: Losses of the samples (n,), from ``reduction="none"``.
        keep: Share of the samples that count, in (0, 1].

    Returns:
        The loss, a scalar.

    Raises:
        TypeError: For a share that is not a number.
        ValueError: For a share out of range, or losses of another shape.

    Example:
        >>> ohem_loss(torch.tensor([1.0, 4.0, 2.0, 3.0]), keep=0.5)
        tensor(3.5000)

    References:
        Shrivastava et al., arXiv 1604.03540.
    """
    _check_keep(keep)
    if losses.ndim != 1 or not len(losses):
        raise ValueError(f"losses must have one entry per sample, (n,), got {tuple(losses.shape)}.")
    count = kept_count(len(losses), keep)
    return losses[hardest(losses, count)].mean() if count < len(losses) else losses.mean()


def kept_count(samples: int, keep: float) -> int:
    """The number of samples to keep, at least one."""
    return max(1, round(keep * samples))


def hardest(losses: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest losses, in the order of the samples."""
    return losses.detach().topk(count).indices.sort().values


@final
class HardExampleFilter(BatchCallback):
    """Trains on the hardest samples of a batch, the ``k = max(1, round(keep * n))`` of n with the largest losses.

    ``mode="prune"`` first runs ``training_step`` without gradients to find them, and then gives the module a batch of
    these samples alone, so that the training step takes less time (selective backpropagation). The scoring pass logs
    nothing and leaves BatchNorm statistics, metrics and attributes of the module unchanged, and weights that the step
    writes by their ``.data``. The training pass draws the same random numbers as the scoring pass, which computes
    gradients only if the step differentiates inside (forces, a gradient penalty). ``score_scale`` makes scoring cheap.
    ``mode="loss"`` keeps the largest losses of the ordinary forward pass, which neither saves nor costs time. Samples
    are compared by the losses of ``torch.nn.functional`` in the step, as they are for each sample alone: a mean over
    the positions that a mask leaves is that over its own, however long it is, and a sum is its sum. In "prune" mode
    several losses are summed, in "loss" mode samples are compared separately for every loss, which must be a mean. (A
    value that you compute from ``reduction="none"`` must be larger for worse samples.)

    "prune" cuts every part of the batch with one entry per sample. It refuses a symmetric matrix over pairs of samples
    (B, B), and a second set of samples beside that of the target, in a container like that of the target with usual
    names and other labels. Use "loss" if a matrix over pairs is not symmetric, which looks like B features of each
    sample, and if a second set has other names or no labels.

    The loss is the mean over the kept samples of all ranks. Every rank keeps the same number of samples, that of the
    smallest batch. Mixing callbacks mix the kept samples. ``tricks/kept_fraction`` and ``tricks/loss_threshold``, the
    smallest loss that was kept, are logged every ``log_every_n_steps``.

    If a loss is NaN, the full batch is used, so that ``SkipNonFinite`` and other guards see it.

    Do not use it with wrong labels: the hardest samples are then the mislabelled ones.

    Args:
        keep: Share of the samples to keep, in (0, 1]; 1.0 filters nothing.
        mode: "prune" or "loss".
        start: When filtering begins (int optimizer steps, float fraction of training).
        stop: When filtering ends, in the form of ``start``.
        every_n_batches: Number of batches of which one is filtered, at least 1.
        score_scale: Factor in (0, 1) of the height and width of images (B, C, H, W), or of the tokens of integer
            sequences (B, T), in the scoring pass of "prune"; None for the full samples.
        across_ranks: Whether "loss" mode keeps the largest losses of all ranks together, in any number per rank.
        inputs: Key, index or path (such as "batch.0") of what ``score_scale`` shrinks, or a list of those; None to
            find them in pairs and under usual names.
        target: Key, index or path of the targets, in the same form.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or one that the mode does not use.
        MisconfigurationException: At fit start for a ``training_step(dataloader_iter)``, for "prune" in manual
            optimization, for "loss" with SAM's ``micro_batch_size``; at the first batch if targets are not found or no
            loss was computed from them; in "prune" mode before a step that writes into its batch or, not by their
            ``.data``, into parameters.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[HardExampleFilter(keep=0.5, start=0.2)], accelerator="cpu", logger=False)

    References:
        Jiang et al., arXiv 1910.00762; Shrivastava et al., arXiv 1604.03540.
    """

    conflicts = (
        Conflict(
            ("SAMHooks",),
            "the samples of a full batch are compared, but micro_batch_size runs parts of it",
            'Remove micro_batch_size, or use mode="prune"',
            lambda trick, hooks: trick.mode == "loss" and hooks.sam.micro_batch_size is not None,
        ),
    )

    def __init__(
        self,
        keep: float = 0.5,
        *,
        mode: Literal["prune", "loss"] = "prune",
        start: int | float = 0,
        stop: int | float = 1.0,
        every_n_batches: int = 1,
        score_scale: float | None = None,
        across_ranks: bool = False,
        inputs: Names = None,
        target: Names = None,
    ) -> None:
        _check_keep(keep)
        check_choice("mode", mode, ("prune", "loss"))
        check_count("every_n_batches", every_n_batches)
        check_bool("across_ranks", across_ranks)
        if score_scale is not None:
            check_range("score_scale", score_scale, 0.0, 1.0, below=True)
            if score_scale == 0 or mode == "loss":
                raise ValueError(f'score_scale must be above 0 and needs mode="prune", got {score_scale} and {mode!r}.')
        if across_ranks and mode == "prune":
            raise ValueError(
                'across_ranks needs mode="loss", got mode="prune": ranks would get batches of unequal size and wait'
                " for the largest."
            )
        self.keep, self.mode, self.every_n_batches = keep, mode, every_n_batches
        self.score_scale, self.across_ranks = score_scale, across_ranks
        self.start, self.stop, self.inputs, self.target = start, stop, inputs, target
        super().__init__()
        self.order = int(mode == "loss")  # runs after a filter in "prune" mode
        self._kept: tuple[float, Tensor] | None = None  # share and threshold of the last batch that was filtered
        self._filtered = False  # whether the present batch was filtered
        self._scoring = WithoutGradients()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        self._kept, self._scoring = None, WithoutGradients()
        if self.mode == "prune" and not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f'HardExampleFilter(mode="prune") runs training_step twice, which would step the optimizers twice, got'
                f' {type(pl_module).__name__}.automatic_optimization=False: use mode="loss".'
            )
        if self.mode == "prune":
            self._wrap(trainer.strategy, "training_step", partial(self._step, type(pl_module).__name__))

    def _step(self, module: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step; name this trick where BatchNorm cannot train on what it has kept."""
        if not self._filtered:
            return original(*args, **kwargs)
        rule = f"HardExampleFilter(keep={self.keep}) leaves {module} one sample"
        with naming_single_samples(rule, 'keep more, or use mode="loss"'):
            return original(*args, **kwargs)

    @override
    def _begin(self) -> None:
        self._filtered = False

    @override
    def _in_steps(self, trainer: L.Trainer, name: str, duration: Any) -> Any:
        # With keep=1 nothing is filtered, so that the length of the training need not be known.
        return 0.0 if self.keep == 1 else super()._in_steps(trainer, name, duration)

    @override
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        if self.keep == 1 or context.number % self.every_n_batches:
            return
        size = self._samples(context.batch)
        sizes = later_extremes(trainer, size)  # which are here when there are losses
        if self.mode == "prune":
            losses = self._losses(trainer, context)
            # Through BatchNorm one NaN spoils the losses of all samples. Guards must see the sample that has it.
            if losses is not None and not losses.isnan().any():
                context.batch = self._selected(context.batch, self._keep(losses, sizes()[0]), size)
                self._samples(context.batch, kept_count(sizes()[0], self.keep))
        elif self.across_ranks:
            context.plan.choose = Selection(lambda losses: self._keep_of_all(trainer, losses, *sizes()))
            context.plan_targets(self, self.targets_in(context.batch))
        else:
            context.plan.choose = Selection(lambda losses: (self._keep(losses, sizes()[0]), 1.0))
            context.plan_targets(self, self.targets_in(context.batch))

    @override
    def _check(self, trainer: L.Trainer, context: BatchContext) -> None:
        if self.keep == 1:
            return
        size = self._samples(context.batch)
        if self.mode == "loss":
            context.plan.choose = context.plan.choose or (lambda losses: None)
            context.plan_targets(self, self.targets_in(context.batch))
            return
        self._losses(trainer, context)
        self._selected(context.batch, slice(0, size), size)

    def _losses(self, trainer: L.Trainer, context: BatchContext) -> Tensor | None:
        batch, targets = context.batch, self.targets_in(context.batch)
        if others := [other for target in targets for other in other_samples(batch, target)]:
            raise MisconfigurationException(
                f'HardExampleFilter(mode="prune") cuts all parts of a batch to the same samples, got'
                f" {spelled(others[0])}, which has inputs and targets like those around {spelled(targets[0])}, but"
                ' other samples: use mode="loss".'
            )
        if self.score_scale is not None:
            batch = shrunk(batch, self.inputs_in(batch), self.score_scale)
        score = partial(per_sample_losses, trainer, batch, targets, context.plan.change_arguments)
        return self._scoring(trainer.lightning_module, score, lambda: None)

    def _selected(self, batch: Any, kept: Samples, size: int) -> Any:
        targets, remedy = len(self.targets_in(batch)), 'use mode="loss", or name another target='
        return select_samples(batch, kept, size, type(self).__name__, targets=targets, remedy=remedy)

    def _keep(self, losses: Tensor, smallest: int) -> Tensor:
        """The samples to keep, of which there are as many as of the smallest batch of a rank."""
        count = kept_count(smallest, self.keep)
        kept = hardest(losses, count)
        self._kept, self._filtered = (count / len(losses), losses[kept].min()), count < len(losses)
        return kept

    def _keep_of_all(self, trainer: L.Trainer, losses: Tensor, smallest: int, largest: int) -> tuple[Tensor, float]:
        """This rank's samples among the hardest of all ranks; a rank without any keeps one, with factor 0."""
        count = kept_count(smallest, self.keep)
        everyone = trainer.strategy.all_gather(F.pad(losses, (0, largest - len(losses)), value=-torch.inf)).flatten()
        rank, ranks = data_parallel(trainer)
        best = hardest(everyone, count * ranks)
        kept = best[best // largest == rank] % largest
        self._kept = len(kept) / len(losses), everyone[best].min()
        return (kept, len(kept) / count) if len(kept) else (losses.argmax().reshape(1), 0.0)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._kept is not None:
            share, threshold = self._kept
            log_every_n_steps(trainer, lambda: {"tricks/kept_fraction": share, "tricks/loss_threshold": threshold})


class Selection:
    """Chooses samples by their losses, and the same ones when the step is run again."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._made: list[tuple[Tensor, float] | None] = []  # the choices of the present run
        self._run, self._again = run_number(), 0

    def __call__(self, losses: Tensor) -> tuple[Tensor, float] | None:
        """The indices of the samples that count, and a factor of their mean; None if all samples count."""
        if is_replaying():
            self._again += 1
            return self._made[(self._again - 1) % len(self._made)]
        if self._run != run_number():
            self._made, self._run, self._again = [], run_number(), 0
        self._made.append(self._choose(losses))
        return self._made[-1]


def _check_keep(keep: float) -> None:
    check_range("keep", keep, 0.0, 1.0)
    if keep == 0:
        raise ValueError(f"keep must be in (0, 1], got {keep}.")
