"""Batch-size warm-up, by accumulation or by the loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_count
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.loaders import ResizableBatches, require_batches, resizable, resize_batches
from lightning_tricks.core.lightning.steps import EpochPlan
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.report import Row
from lightning_tricks.core.trick import Trick
from lightning_tricks.schedules.scaling import scaled_lrs

__all__ = ["BatchSizeWarmup"]


def doublings(initial: int, final: int) -> list[int]:
    """``initial`` doubled again and again, with ``final`` as the last number.

    >>> doublings(1, 8), doublings(2, 12)
    ([1, 2, 4, 8], [2, 4, 8, 12])
    """
    factors = [initial]
    while factors[-1] < final:
        factors.append(min(2 * factors[-1], final))
    return factors


def factor_at(epoch: int, factors: Sequence[int], growth: int) -> int:
    """The factor of an epoch: all but the last in equal parts of the first ``growth`` epochs, then the last.

    >>> [factor_at(epoch, [1, 2, 4], growth=4) for epoch in range(6)]
    [1, 1, 2, 2, 4, 4]
    """
    last = len(factors) - 1
    return factors[min(epoch * last // growth, last)]


def first_epochs(factors: Sequence[int], growth: int) -> list[int]:
    """The first epoch of each factor that ``factor_at`` does not leave out.

    >>> first_epochs([1, 2, 4], growth=4), first_epochs([1, 2, 4, 8], growth=1)
    ([0, 2, 4], [0, 1])
    """
    last = max(len(factors) - 1, 1)
    return sorted({min(-(-place * growth // last), growth) for place in range(len(factors))})


@final
class BatchSizeWarmup(EpochPlan, Trick):
    """Batch-size warm-up: an optimizer step's batch grows from ``initial`` to ``final`` times the loader's.

    ``batch_e = factors[min(floor(e * n / E), n)] * loader's batch`` in epoch e, with ``factors`` the n+1 doublings
    ``initial, 2*initial, ..., final`` and E epochs of growth; ``lr = schedule's lr * batch_e / batch_final``, or with
    the square root of that ratio. The batch changes between epochs only, so that no accumulation window is cut, and
    ``optimizer_steps`` takes it into account. With fewer epochs of growth than factors some factors are left out. The
    learning rate is changed only while the optimizer steps: schedules, checkpoints and LearningRateMonitor have the
    schedule's.

    Args:
        initial: The number of the loader's batches in the first optimizer steps, at least 1.
        final: The number in the optimizer steps after the growth, at least ``initial``.
        factors: The sequence of these numbers, in ascending order, instead of ``initial`` and ``final``.
        over: E, the epochs of growth (int epochs, float fraction of ``max_epochs``, rounded down to an integer of at
            least 1).
        lr_rule: ``"linear"`` (SGD) or ``"sqrt"`` (Adam), for a learning rate that was tuned for ``final``; None for
            no change of the learning rate.
        grow: ``"accumulate"`` to accumulate that many batches, or ``"loader"`` to load batches that many times as
            large, which needs a DataLoader with torch's BatchSampler, over any sampler.

    Raises:
        ValueError: For a value out of range, or factors that shrink.
        TypeError: For a value of the wrong type.
        MisconfigurationException: When training starts: with manual optimization, DeepSpeed, another callback that
            accumulates, a fraction of ``max_epochs=-1``, ``accumulate_grad_batches`` in the Trainer or a loader that
            cannot grow, or a resume after epochs with other factors.

    Example:
        >>> import lightning as L
        >>> growth = BatchSizeWarmup(initial=1, final=8, over=0.5)
        >>> trainer = L.Trainer(callbacks=[growth], accelerator="cpu", logger=False)

    References:
        Smith et al., Don't Decay the Learning Rate, Increase the Batch Size, arXiv 1711.00489; McCandlish et al., An
        Empirical Model of Large-Batch Training, arXiv 1812.06162.
    """

    conflicts = (
        Conflict(("GradientAccumulationScheduler",), "both decide how many batches are accumulated"),
        Conflict(
            ("accumulate_grad_batches",),
            'with grow="accumulate" both decide how many batches are accumulated',
            "Remove accumulate_grad_batches and multiply initial and final by it",
            lambda trick, _: bool(trick.grow == "accumulate"),
        ),
    )

    def __init__(
        self,
        initial: int = 1,
        *,
        final: int = 8,
        factors: Sequence[int] | None = None,
        over: int | float = 0.5,
        lr_rule: str | None = None,
        grow: str = "accumulate",
    ) -> None:
        check_count("initial", initial)
        _check_over(over)
        check_choice("grow", grow, ("accumulate", "loader"))
        if lr_rule is not None:
            check_choice("lr_rule", lr_rule, ("linear", "sqrt"))
        super().__init__()
        self._sequence = _sequence(initial, final, factors)
        self.initial = initial
        self.final = final
        self.factors = factors
        self.over = over
        self.lr_rule = lr_rule
        self.grow = grow
        self._past: list[tuple[int, int]] = []  # the results of step_of for the epochs so far

    @property
    def needs_step_hooks(self) -> bool:  # type: ignore[override]
        """Whether the learning rate changes around optimizer steps."""
        return self.lr_rule is not None

    def factor(self, trainer: L.Trainer, epoch: int) -> int:
        """The number of the loader's batches in an optimizer step of an epoch."""
        return factor_at(epoch, self._sequence, self._growth(trainer))

    def _growth(self, trainer: L.Trainer) -> int:
        if isinstance(self.over, int):
            return self.over
        return max(1, math.floor(self.over * (trainer.max_epochs or 0) + 1e-9))  # 0.29 * 100 is less than 29

    @override
    def step_of(self, trainer: L.Trainer, epoch: int) -> tuple[int, int]:
        factor = self.factor(trainer, epoch)
        return (factor, 1) if self.grow == "accumulate" else (trainer.accumulate_grad_batches, factor)

    @override
    def changes(self, trainer: L.Trainer) -> list[int]:
        return first_epochs(self._sequence, self._growth(trainer))

    @override
    def row(self, trainer: L.Trainer) -> Row:
        return "BatchSizeWarmup", {"factors": self._sequence, "over": f"{self._growth(trainer)} epochs"}

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        self._refuse(trainer, pl_module)
        if trainer.current_epoch == 0:
            self._past = []
        if self.grow == "accumulate":
            self._undo.callback(setattr, trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches)
        else:
            self._wrap(trainer.strategy, "process_dataloader", partial(self._grown, trainer))
        if self.lr_rule:
            self._wrap(trainer.strategy, "optimizer_step", partial(self._step, trainer))

    def _refuse(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = type(trainer.strategy).__name__
        if not pl_module.automatic_optimization:
            found = f"{type(pl_module).__name__}.automatic_optimization=False: step after more batches in training_step"
        elif trainer.strategy.handles_gradient_accumulation:
            found = f"{strategy}, which fixes batch and accumulation when it starts: use another strategy"
        elif isinstance(self.over, float) and trainer.max_epochs == -1:
            found = f"over={self.over}, a fraction of max_epochs=-1: give over in epochs (an int)"
        elif self.grow == "loader" and trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            found = "grow='loader' and reload_dataloaders_every_n_epochs: use grow='accumulate'"
        else:
            return
        raise MisconfigurationException(f"BatchSizeWarmup cannot work with {found}, or remove BatchSizeWarmup.")

    def _grown(self, trainer: L.Trainer, process: Callable[[Any], Any], loader: Any) -> DataLoader[Any]:
        loader = process(loader)
        if not trainer.training:  # a validation loader
            return loader
        loader = resizable(loader, "BatchSizeWarmup(grow='loader')", ", or BatchSizeWarmup(grow='accumulate')")
        batches = loader.batch_sampler
        assert isinstance(batches, ResizableBatches)
        batches.batch_size = batches.base * self.factor(trainer, trainer.current_epoch)
        return loader

    def _step(self, trainer: L.Trainer, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kw: Any) -> Any:
        scale = self.factor(trainer, trainer.current_epoch) / self._sequence[-1]
        scale = math.sqrt(scale) if self.lr_rule == "sqrt" else scale
        with scaled_lrs(optimizer, scale, f"BatchSizeWarmup(lr_rule={self.lr_rule!r})"):
            return step(optimizer, *args, **kw)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        planned = [self.step_of(trainer, epoch) for epoch in range(max(trainer.current_epoch, len(self._past)))]
        if self._past != planned or (trainer.ckpt_path and trainer.global_step and not self._past):
            raise MisconfigurationException(
                f"BatchSizeWarmup resumes after epochs with {planned} (accumulated batches, batch size), but training"
                f" had {self._past or 'no such epochs, without this callback'}. Resume with the same settings, got"
                f" over={self.over!r}; an int does not depend on max_epochs."
            )
        if self.grow == "loader":
            most = math.inf if trainer.max_epochs == -1 else trainer.max_epochs or 0
            ahead = {self.factor(trainer, epoch) for epoch in self.changes(trainer) if epoch < most}
            require_batches(trainer, ahead, "BatchSizeWarmup(grow='loader')")
        self._begin(trainer)  # a resumed epoch has no on_train_epoch_start

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(trainer)

    def _begin(self, trainer: L.Trainer) -> None:
        accumulation, multiple = now = self.step_of(trainer, trainer.current_epoch)
        self._past[trainer.current_epoch :] = [now]
        if self.grow == "accumulate":
            trainer.accumulate_grad_batches = accumulation
        else:
            resize_batches(trainer, multiple)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"past": list(self._past)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._past = [(accumulated, size) for accumulated, size in state_dict["past"]]  # XLA's checkpoints have lists


def _check_over(over: object) -> None:
    if isinstance(over, bool) or not isinstance(over, int | float):
        raise TypeError(f"over must be an int (epochs) or a float (fraction of max_epochs), got {over!r}.")
    if over < 1 if isinstance(over, int) else not 0 < over < 1:
        raise ValueError(f"over must be an int >= 1 (epochs) or a float in (0, 1) (fraction), got {over!r}.")


def _sequence(initial: int, final: int, factors: Sequence[int] | None) -> list[int]:
    check_count("final", final)
    if factors is None:
        if final < initial:
            raise ValueError(f"final must be at least initial={initial}, got {final}: the batch can only grow.")
        return doublings(initial, final)
    if (initial, final) != (1, 8):
        raise ValueError(
            f"factors={factors!r} replaces initial and final, got initial={initial} and final={final}: leave them out."
        )
    if not isinstance(factors, Sequence) or not factors:
        raise TypeError(f"factors must be a sequence of integers, got {factors!r}.")
    for place, factor in enumerate(factors):
        check_count(f"factors[{place}]", factor)
    if list(factors) != sorted(factors):
        raise ValueError(f"factors must not shrink, got {list(factors)}: sort them.")
    return list(factors)
