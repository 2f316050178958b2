"""Reduce the learning rate when a metric no longer improves."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any, Literal, SupportsFloat, final

import lightning.pytorch as pl
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_count, check_duration, check_kind, check_range
from lightning_tricks.schedules.build import (
    Duration,
    Schedule,
    announce,
    check_arguments,
    count_steps,
    trainer_of,
    whole_steps,
)
from lightning_tricks.schedules.scheduler import base_lr, set_lr

_SETTINGS = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "eps", "warmup", "floor")


@final
class PlateauLR(ReduceLROnPlateau):
    """torch's ReduceLROnPlateau with a warm-up in optimizer steps: ``lr = base (t+1)/W`` while ``t < W``.

    ``base`` is as in CurveLR. The warm-up follows the optimizer by itself, in manual optimization too; metrics of that
    time do not count. Afterwards ``step(metric)`` works as torch's: Lightning calls it, or in manual optimization you
    do. Loaded into a scheduler with other settings it warns and follows the new ones.

    Args:
        optimizer: The optimizer to schedule.
        warmup: W, in optimizer steps.
        floor: Lowest factor of each group's base learning rate, in place of torch's ``min_lr``.
        **settings: Of torch's scheduler.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = PlateauLR(optimizer, warmup=4)
        >>> optimizer.param_groups[0]["lr"]
        0.025
    """

    def __init__(self, optimizer: Optimizer, *, warmup: float = 0, floor: float = 0.0, **settings: Any) -> None:
        check_range("warmup", warmup, 0.0)
        check_range("floor", floor, 0.0, 1.0)
        super().__init__(optimizer, min_lr=0.0, **settings)
        self.warmup, self.floor, self.steps = warmup, floor, 0
        self._begun = False
        self._set_lrs()
        self._follow_the_optimizer()

    @property
    def settings(self) -> dict[str, Any]:
        """What a table of schedules says."""
        return {"curve": "reduce_on_plateau", "factor": self.factor, "patience": self.patience} | {
            "warmup": self.warmup,
            "floor": self.floor,
        }

    @override
    def step(self, metrics: SupportsFloat, epoch: int | None = None) -> None:  # type: ignore[override]
        if self.steps >= self.warmup:
            self._set_lrs()
            self.min_lrs = [self.floor * float(base_lr(group)) for group in self.optimizer.param_groups]
            super().step(metrics, epoch)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "num_bad_epochs" not in state_dict:
            raise ValueError(
                "The checkpoint holds the state of another kind of scheduler than PlateauLR, with"
                f" {', '.join(map(repr, state_dict))}: resume with that one, or start from the checkpoint's weights."
            )
        mine = {name: vars(self)[name] for name in _SETTINGS}
        saved = {name: state_dict.get(name, value) for name, value in mine.items()}
        if saved != mine:
            warnings.warn(
                f"The schedule of the checkpoint, {saved}, is not this run's, {mine}: this run's is followed from here"
                " on.",
                stacklevel=2,
            )
        super().load_state_dict({**state_dict, **mine})
        if saved["mode"] != self.mode:
            self._reset()  # the best metric so far is the worst one now
        self._set_lrs()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._follow_the_optimizer()  # a copied optimizer comes without its hooks

    def _follow_the_optimizer(self) -> None:
        self.optimizer.register_step_pre_hook(self._begin)
        self.optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._begun = True

    def _end(self, *_: Any) -> None:
        if self._begun:  # torch calls the hooks again for the step of a parent class
            self._begun = False
            self.steps += 1
            self._set_lrs()

    def _set_lrs(self) -> None:
        """Those of the warm-up, and of groups that have just joined the optimizer."""
        warming = self.steps < self.warmup
        factor = min(1.0, (self.steps + 1) / self.warmup) if warming else 1.0
        for group in self.optimizer.param_groups:
            if warming or "initial_lr" not in group:
                set_lr(group, base_lr(group) * factor)
        if warming:
            self._last_lr = [deepcopy(group["lr"]) for group in self.optimizer.param_groups]


def reduce_on_plateau(
    optimizer: Optimizer,
    module: pl.LightningModule | None = None,
    *,
    monitor: str = "val_loss",
    mode: Literal["min", "max"] = "min",
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    warmup: Duration = 0,
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, then the learning rate times ``factor`` whenever a metric has not improved for ``patience`` epochs.

    Args:
        optimizer: The optimizer to schedule.
        module: The LightningModule; needed if ``warmup`` is a fraction of its training, in manual optimization, or
            with ``check_val_every_n_epoch`` in the Trainer, when only those epochs count.
        monitor: Name of the logged metric.
        mode: Whether it improves by becoming smaller ("min") or larger ("max").
        factor: Of each reduction, in [0, 1).
        patience: Epochs without improvement that are waited for.
        threshold: The smallest relative change that counts as an improvement.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        floor: Lowest factor of the base learning rate, in [0, 1].

    Returns:
        The dictionary for ``configure_optimizers``. In manual optimization call ``self.lr_schedulers().step(metric)``.
        In automatic optimization Lightning itself leaves out the metric of the epoch that a run is resumed in.

    Raises:
        ValueError: If a value is out of range.
        UnknownTotalSteps: If a fraction is given and the total cannot be known.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> reduce_on_plateau(optimizer, monitor="val_accuracy", mode="max")["lr_scheduler"]["monitor"]
        'val_accuracy'
    """
    check_arguments(optimizer, module)
    check_kind("monitor", monitor, str)
    check_choice("mode", mode, ("min", "max"))
    check_range("factor", factor, 0.0, 1.0, below=True)
    check_count("patience", patience, least=0)
    check_range("threshold", threshold, 0.0)
    check_range("floor", floor, 0.0, 1.0)
    check_duration("warmup", warmup)
    announce(module)
    steps = whole_steps(warmup, count_steps(module)) if isinstance(warmup, float) and warmup else float(warmup)
    scheduler = PlateauLR(
        optimizer,
        warmup=steps,
        floor=float(floor),
        mode=mode,
        factor=float(factor),
        patience=patience,
        threshold=float(threshold),
    )
    every = getattr(trainer_of(module), "check_val_every_n_epoch", None) or 1  # None: validation by batches
    config = {"scheduler": scheduler, "interval": "epoch", "frequency": every}
    if module is None or module.automatic_optimization:
        config["monitor"] = monitor
    return {"optimizer": optimizer, "lr_scheduler": config}
