"""Which learning rate to train with: a short sweep over all of them, and what its losses say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_count, check_range
from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.lightning.trainer import callbacks_of
from lightning_tricks.core.replay.undone_fit import UndoneFit, require_undoable
from lightning_tricks.core.report import progress
from lightning_tricks.schedules.scheduler import base_lr, set_lr

__all__ = ["LRFinderResult", "find_lr"]


Method = Literal["valley", "steepest", "minimum/10"]
_FEWEST = 10  # the fewest losses that a suggestion can be made of


def smoothed_losses(lrs: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Means of the losses nearby: ``s_i = sum_j w_ij L_j / sum_j w_ij``, ``w_ij = exp(-(i-j)^2 / 2h^2)``.

    The bandwidth h is a quarter of a decade of learning rates, at least two steps. A loss counts as at most 8 times the
    first, so that one that explodes does not reach back to those before it.

    >>> [round(loss, 2) for loss in smoothed_losses([1e-3, 1e-2, 1e-1, 1.0], [3.0, 3.0, 3.0, 1e9])]
    [5.42, 6.78, 8.5, 10.46]
    """
    width = _bandwidth(lrs)
    return [_smoothed(losses, i, width) for i in range(len(losses))]


def _bandwidth(lrs: Sequence[float]) -> float:
    return max(2.0, 0.25 / math.log10(lrs[1] / lrs[0])) if len(lrs) > 1 else 2.0


def _smoothed(losses: Sequence[float], i: int, width: float) -> float:
    reach, most = math.ceil(4 * width), losses[0] + 7 * abs(losses[0]) if losses[0] else math.inf
    near = range(max(0, i - reach), min(len(losses), i + reach + 1))
    weights = [math.exp(-((i - j) ** 2) / (2 * width**2)) for j in near]
    return math.fsum(w * min(losses[j], most) for w, j in zip(weights, near, strict=True)) / math.fsum(weights)


def suggested_lr(lrs: Sequence[float], losses: Sequence[float], method: Method = "valley") -> float:
    """The learning rate that a sweep's losses suggest; see ``LRFinderResult.suggestion``.

    >>> lrs = [10 ** (-6 + i / 10) for i in range(60)]
    >>> losses = [1 / (1 + (1e3 * lr) ** 2) + (3 * lr) ** 2 for lr in lrs]  # falls at 1e-3, rises from 0.1 on
    >>> [f"{suggested_lr(lrs, losses, method):.0e}" for method in ("valley", "steepest", "minimum/10")]
    ['1e-03', '1e-03', '2e-03']
    """
    check_choice("method", method, get_args(Method))
    if len(losses) < _FEWEST:
        raise ValueError(
            f"A suggestion needs at least {_FEWEST} losses, got {len(losses)}: the sweep ended early. Lower min_lr, or"
            " see why the loss is not finite."
        )
    smoothed = smoothed_losses(lrs, losses)
    lowest = list(accumulate(smoothed, min))  # the lowest loss so far, so that a fall after a rise does not count
    fall, noise = lowest[0] - lowest[-1], _noise(losses, smoothed)
    if fall <= noise:
        raise ValueError(
            f"The loss must fall for a suggestion: from {lrs[0]:.1e} to {lrs[-1]:.1e} it fell by {fall:.2g}, and its"
            f" noise is {noise:.2g}. Sweep a wider range, take more steps, or larger batches."
        )
    if method == "minimum/10":
        return lrs[smoothed.index(lowest[-1])] / 10
    end = next(i for i, loss in enumerate(lowest) if loss <= lowest[0] - 0.9 * fall)
    start = max(i for i in range(end) if smoothed[i] > lowest[0] - 0.1 * fall)
    if method == "valley":
        return math.sqrt(lrs[start] * lrs[end])
    inside = range(start + 1, min(end + 1, len(lrs) - 1))
    slopes = {i: (lowest[i + 1] - lowest[i - 1]) / math.log(lrs[i + 1] / lrs[i - 1]) for i in inside}
    return lrs[min(slopes, key=slopes.__getitem__, default=end)]


def _noise(losses: Sequence[float], smoothed: Sequence[float]) -> float:
    """The standard deviation of the losses about the smoothed ones, by the median up to the lowest."""
    end = list(smoothed).index(min(smoothed)) + 1
    away = sorted(abs(loss - s) for loss, s in zip(losses[:end], smoothed[:end], strict=True))
    return 1.48 * away[len(away) // 2]


@dataclass(frozen=True)
class LRFinderResult:
    """The result of ``find_lr``.

    Args:
        lrs: Learning rate of each optimizer step, rising, for the parameter group whose base is the largest.
        losses: Loss of each step before it is taken, the mean over its batches and over ranks.

    Example:
        >>> lrs = [10 ** (-6 + i / 10) for i in range(60)]
        >>> result = LRFinderResult(tuple(lrs), tuple(1 / (1 + (1e3 * lr) ** 2) + (3 * lr) ** 2 for lr in lrs))
        >>> f"{result.suggestion():.0e}"
        '1e-03'
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The losses smoothed over a quarter of a decade of learning rates."""
        return tuple(smoothed_losses(self.lrs, self.losses))

    def suggestion(self, method: Method = "valley") -> float:
        """A base learning rate for the parameter group whose base is the largest; the others keep their ratio to it.

        The fall lasts from where the smoothed loss was last less than a tenth down to where it first is nine tenths
        down, on its way from the first to the lowest.

        Args:
            method: "valley", the middle of the fall in log lr; "steepest", where in it the lowest smoothed loss so far
                falls fastest against log lr; "minimum/10", a tenth of the learning rate of the lowest smoothed loss.

        Returns:
            The learning rate.

        Raises:
            ValueError: For another method, fewer than 10 losses, or a loss that fell by no more than its noise.
        """
        return suggested_lr(self.lrs, self.losses, method)

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw losses and suggestions, into the given axes or into a figure of its own.

        Raises:
            ImportError: If matplotlib is missing.
        """
        figure, ax = figure_and_axes(ax)
        smoothed = self.smoothed
        ax.plot(self.lrs, self.losses, ".", color="0.7", label="loss")
        ax.plot(self.lrs, smoothed, label="smoothed")
        for number, method in enumerate(get_args(Method), 1):
            try:
                lr = self.suggestion(method)
            except ValueError:  # a curve without a suggestion is all the more worth looking at
                continue
            ax.axvline(lr, color=f"C{number}", linestyle="--", label=f"{method} {lr:.1e}")
        ax.set(xscale="log", xlabel="learning rate", ylabel="loss")
        if smoothed:
            low, high = min(self.losses), max(smoothed)
            margin = 0.05 * (high - low) or 1.0
            ax.set_ylim(low - margin, high + margin)  # losses that explode would flatten the others
        ax.legend()
        return figure, ax

    def to_dict(self) -> dict[str, list[float]]:
        """Plain data, for JSON or a table."""
        return {"lrs": list(self.lrs), "losses": list(self.losses), "smoothed": list(self.smoothed)}


def find_lr(
    trainer: L.Trainer,
    module: L.LightningModule,
    train_dataloaders: Any = None,
    datamodule: L.LightningDataModule | None = None,
    *,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    steps: int = 100,
    stop_factor: float = 4.0,
) -> LRFinderResult:
    """Measure the loss in optimizer steps of rising learning rate: ``lr_k = min_lr (max_lr/min_lr)^(k/(steps-1))``.

    The sweep is a fit by the Trainer's own strategy, precision, accumulation and clipping in which nothing else
    happens: no callbacks, loggers, validation, checkpoints or schedules; SAM takes the plain gradient. It stops where
    the smoothed loss is ``stop_factor - 1`` usual losses (their median) above its lowest, or a loss is not finite.

    ``lr_k``, and so the suggestion, is the learning rate of the parameter group with the largest base learning rate
    (``base`` of CurveLR): the only one, or the head of ``layer_decay_groups``. The others keep their ratio to it.

    Afterwards, also after an exception or Ctrl-C, everything is bit for bit as before: weights, buffers, gradients and
    attributes of the module, the Trainer, callbacks, random numbers, loaders, samplers and their generators; a
    following ``trainer.fit`` is as it would have been. Not undone is what module and data do outside of those: files,
    the contents of a data set, objects of your own classes.

    Args:
        trainer: The Trainer that is to fit.
        module: The LightningModule, whose ``configure_optimizers`` makes the optimizer.
        train_dataloaders: Training loaders, as ``trainer.fit`` takes them.
        datamodule: LightningDataModule, as ``trainer.fit`` takes it.
        min_lr: First learning rate, above 0.
        max_lr: Last learning rate, above ``min_lr``.
        steps: Number of optimizer steps, at least 10, in as many epochs as that takes.
        stop_factor: Multiple of the usual loss that ends the sweep, as said above; above 1.

    Returns:
        Learning rates and losses; ``.suggestion()`` and ``.plot()`` say what they mean.

    Raises:
        TypeError: For a value of the wrong type, or loaders that can be read only once.
        ValueError: For a value out of range.
        MisconfigurationException: For manual optimization, lazy layers, an optimizer without a learning rate, inside
            a fit, and under FSDP1, DeepSpeed and strategies that spawn or fork.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(
        ...     accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
        ...     enable_model_summary=False,
        ... )
        >>> result = find_lr(trainer, BoringModel(), max_lr=1e-4, steps=20)
        >>> len(result.losses), trainer.global_step
        (20, 0)

    References:
        Smith, arXiv 1506.01186; ``lr_find`` of fastai.
    """
    for name, value in (("min_lr", min_lr), ("max_lr", max_lr)):
        check_range(name, value, 0.0, torch.finfo(torch.float32).max)
    if not 0 < min_lr < max_lr:
        raise ValueError(f"min_lr must be above 0 and below max_lr, got {min_lr} and {max_lr}.")
    check_count("steps", steps)
    if steps < _FEWEST:
        raise ValueError(f"steps must be at least {_FEWEST}, got {steps}: fewer losses suggest nothing.")
    check_range("stop_factor", stop_factor, 1.0)
    if stop_factor == 1:
        raise ValueError("stop_factor must be above 1, got 1: any noise would end the sweep.")
    lowest = math.inf

    def ends(lrs: Sequence[float], losses: Sequence[float]) -> bool:
        nonlocal lowest
        latest = _smoothed(losses, len(losses) - 1, _bandwidth(lrs))
        lowest = min(lowest, latest)
        usual = max(abs(lowest), median(map(abs, losses)))  # a loss may be below 0, or near it by chance
        return len(losses) >= _FEWEST and latest > lowest + (stop_factor - 1) * usual

    rates = [min_lr * (max_lr / min_lr) ** (k / (steps - 1)) for k in range(steps)]
    lrs, losses = sweep(trainer, module, train_dataloaders, datamodule, rates, ends)
    return LRFinderResult(tuple(lrs), tuple(losses))


Curve = tuple[list[float], list[float]]  # learning rates and losses


def sweep(
    trainer: L.Trainer, module: Any, loaders: Any, datamodule: Any, rates: Sequence[float], ends: Callable[..., bool]
) -> Curve:
    """Fit with one learning rate a step, and undo it.

    Args:
        trainer: The Trainer.
        module: The LightningModule, compiled or not.
        loaders: Training loaders, as ``trainer.fit`` takes them.
        datamodule: LightningDataModule, as ``trainer.fit`` takes it.
        rates: Learning rate of each optimizer step, for the parameter group with the largest base learning rate.
        ends: Function of the learning rates and losses so far that says whether to stop.

    Returns:
        The learning rates of the steps taken, and their losses, all finite.
    """
    require_undoable(trainer, module, loaders, "find_lr")
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"find_lr steps the optimizer itself, got {type(module).__name__}.automatic_optimization=False, in which"
            " training_step does."
        )
    with progress(None, "find_lr", len(rates)) as bar:
        run = Sweep(rates, ends, callbacks_of(trainer, GradientAccumulationScheduler), bar)
        run.fit(trainer, module, loaders, datamodule)
    return run.rates, run.losses


class Sweep(UndoneFit):
    """Sets the learning rates, records the losses and stops."""

    def __init__(
        self,
        rates: Sequence[float],
        ends: Callable[..., bool],
        accumulation: list[GradientAccumulationScheduler],
        bar: Any,
    ) -> None:
        super().__init__()
        self._planned, self._ends, self._accumulation, self._bar = rates, ends, accumulation, bar
        self.rates: list[float] = []
        self.losses: list[float] = []
        # The ratios of the groups' base learning rates to the largest of them.
        self._ratios: list[float] = []
        self._first = self._taken = self._before = 0  # optimizer steps before the sweep, in it, in it before this epoch
        self._total, self._batches = torch.zeros(()), 0  # sum of losses and number of batches in this window

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._ratios = _ratios(trainer.optimizers[0])
        self._first = trainer.global_step
        trainer.fit_loop.epoch_loop.max_steps = self._first + len(self._planned)
        if self._accumulation:
            trainer.accumulate_grad_batches = self._accumulation[-1].get_accumulate_grad_batches(0)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._set(trainer.optimizers[0])

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._set(optimizer)  # again, after a warm-up in the module's own optimizer_step

    def _set(self, optimizer: Optimizer) -> None:
        for group, ratio in zip(optimizer.param_groups, self._ratios, strict=False):
            set_lr(group, ratio * self._planned[min(self._taken, len(self._planned) - 1)])

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs:  # empty if training_step returned None
            self._total = self._total.to(outputs["loss"].device) + outputs["loss"].detach()
            self._batches += 1
        if trainer.global_step == self._first + self._taken:
            return  # within an accumulation window
        # Lightning has divided each loss by the length of the window
        total = self._total.float() * trainer.accumulate_grad_batches
        window = torch.stack([total, torch.tensor(float(self._batches), device=total.device)])
        total, batches = trainer.strategy.reduce(window.to(trainer.strategy.root_device), reduce_op="sum").tolist()
        loss, rate = total / batches if batches else None, self._planned[min(self._taken, len(self._planned) - 1)]
        self._taken, self._total, self._batches = trainer.global_step - self._first, torch.zeros(()), 0
        if loss is None:
            return
        if not abs(loss) < float("inf"):
            trainer.should_stop = True
            return
        self._bar.update()
        self.rates.append(rate)
        self.losses.append(loss)
        trainer.should_stop = self._ends(self.rates, self.losses)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._taken == self._before:  # an epoch without a step: the loader is a stream that has run dry
            trainer.should_stop = True
        self._before = self._taken


def _ratios(optimizer: Optimizer) -> list[float]:
    """The ratio of each group's base learning rate, which schedules multiply, to the largest of them."""
    given = [group.get("lr") for group in optimizer.param_groups]
    numbers = all(isinstance(rate, int | float | Tensor) for rate in given)
    rates = [float(base_lr(dict(group))) for group in optimizer.param_groups] if numbers else []
    if max(rates, default=0.0) <= 0:
        raise MisconfigurationException(
            "find_lr needs an optimizer from configure_optimizers whose parameter groups have a learning rate, above 0"
            f" in one of them, got {rates or given} in {type(optimizer).__name__}: set lr."
        )
    return [rate / max(rates) for rate in rates]
