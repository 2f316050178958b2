"""Reduce the learning rate when a metric no longer improves."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal, SupportsFloat, final

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfigType
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from lightning_tricks.core.checks import check_range
from lightning_tricks.core.conflicts import Participant
from lightning_tricks.core.lightning.fit import Place
from lightning_tricks.core.lightning.loaders import train_batches_of_sizes
from lightning_tricks.core.lightning.trainer import trainer_of
from lightning_tricks.core.report import Row, curve_row, in_whole_steps
from lightning_tricks.schedules.arguments import Duration, check_arguments, check_settings, count_steps, whole_steps
from lightning_tricks.schedules.planned import Schedule, announce_schedule
from lightning_tricks.schedules.scheduler import (
    CONFLICTS,
    base_lr,
    check_state,
    has_hooks,
    prepare_hooks,
    set_lr,
    warn_of_other_settings,
)

__all__ = ["PlateauLR", "reduce_on_plateau"]

_OF_THIS_RUN = ("duration", "occasion", "_saved", "_begun")  # what is no part of the state, which torch makes of all
_SETTINGS = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "eps", "warmup", "floor")


@final
class PlateauLR(Participant, ReduceLROnPlateau):
    """torch's ReduceLROnPlateau with a warm-up in optimizer steps: ``lr = base (t+1)/W`` while ``t < W``.

    ``base`` is as in CurveLR. The warm-up follows the optimizer by itself, in manual optimization too, and metrics that
    arrive during it do not count. Afterwards ``step(metric)`` works as torch's: Lightning calls it, or in manual
    optimization you do. A state loaded into a scheduler with other settings warns, and the new ones are followed.

    Args:
        optimizer: The optimizer to schedule.
        warmup: W, number of optimizer steps; may be fractional.
        floor: Lowest factor of each group's base learning rate, in [0, 1], in place of torch's ``min_lr``.
        **settings: Other arguments of torch's scheduler.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = PlateauLR(optimizer, warmup=4)
        >>> optimizer.param_groups[0]["lr"]
        0.025
    """

    conflicts = CONFLICTS

    def __init__(self, optimizer: Optimizer, *, warmup: float = 0, floor: float = 0.0, **settings: Any) -> None:
        check_range("warmup", warmup, 0.0)
        check_range("floor", floor, 0.0, 1.0)
        if warmup and not has_hooks(optimizer):
            raise ValueError(
                f"warmup must be 0 for {type(optimizer).__name__}, which does not call Optimizer.__init__ and has no"
                f" step hooks to follow, got {warmup}."
            )
        prepare_hooks(optimizer)
        super().__init__(optimizer, min_lr=0.0, **settings)
        self.warmup, self.floor, self.steps = warmup, floor, 0
        self.duration: Duration | None = None  # of the warm-up in a fit, as a factory was given it
        self.occasion: tuple[str, int] | None = None  # the interval and frequency of its steps, of a bare scheduler
        self._saved: dict[str, Any] = {}  # the settings of the checkpoint, until they are compared
        self._begun = False
        self._set_lrs()
        self._follow_the_optimizer()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the table of active tricks shows."""
        return {"curve": "reduce_on_plateau"} | {
            name: vars(self)[name] for name in ("factor", "patience", "warmup", "floor")
        }

    @override
    def row(self, trainer: L.Trainer) -> Row:
        return curve_row(in_whole_steps(self.settings))

    @override
    def given(self) -> Row:
        return curve_row(self.settings | ({} if self.duration is None else {"warmup": self.duration}))

    @override
    def step(self, metrics: SupportsFloat, epoch: int | None = None) -> None:  # type: ignore[override]
        if self.steps >= self.warmup:
            self._set_lrs()
            self.min_lrs = [self.floor * float(base_lr(group)) for group in self.optimizer.param_groups]
            super().step(metrics, epoch)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name not in _OF_THIS_RUN}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state(self, state_dict, "num_bad_epochs")
        own = {name: vars(self)[name] for name in _SETTINGS}
        saved = {name: state_dict.get(name, value) for name, value in own.items()}
        self._saved = saved
        if self.duration is None:
            warn_of_other_settings(saved, own)
        super().load_state_dict({**state_dict, **own})
        if saved["mode"] != self.mode:
            self._reset()  # the best metric so far is the worst one now
        self._set_lrs()

    def follow(self, place: Place, before: Place, taken: int) -> None:
        """Go on at the step of the plan, when a fit begins; see ``CurveLR.follow``."""
        if self.duration is None:
            return
        if place.plan is not None and self.duration:
            warmed = self.steps >= self.warmup
            self.warmup = self._warmup_at(place)
            self.steps = self.steps + place.offset - before.offset if self.steps else taken + place.offset
            for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=False):
                if not warmed and group["lr"] == lr:  # that of the warm-up, not of a checkpoint without a schedule
                    set_lr(group, base_lr(group))
            self._set_lrs()
            self._last_lr = [deepcopy(group["lr"]) for group in self.optimizer.param_groups]
        if self._saved:
            warmup = self.warmup if before.plan is None else self._warmup_at(before)
            own = {name: vars(self)[name] for name in _SETTINGS} | {"warmup": warmup}
            warn_of_other_settings(self._saved, own)  # not of the plan, which is told once for all schedules
            self._saved = {}

    def _warmup_at(self, place: Place) -> float:
        return whole_steps(self.duration or 0, place.total, place)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._follow_the_optimizer()  # a copied optimizer comes without its hooks

    def _follow_the_optimizer(self) -> None:
        if has_hooks(self.optimizer):
            self.optimizer.register_step_pre_hook(self._begin)
            self.optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._begun = True

    def _end(self, *_: Any) -> None:
        if self._begun:  # torch calls the hooks once more where an optimizer's step calls that of its parent class
            self._begun = False
            self.steps += 1
            self._set_lrs()

    def _set_lrs(self) -> None:
        """Set the learning rates of the warm-up, and after it of groups that have just joined the optimizer."""
        warming = self.steps < self.warmup
        factor = min(1.0, (self.steps + 1) / self.warmup) if warming else 1.0
        for group in self.optimizer.param_groups:
            if warming or "initial_lr" not in group:
                set_lr(group, base_lr(group) * factor)
        if warming:
            self._last_lr = [deepcopy(group["lr"]) for group in self.optimizer.param_groups]


def reduce_on_plateau(
    optimizer: Optimizer,
    module: L.LightningModule | None = None,
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
        module: The LightningModule (``self`` in ``configure_optimizers``); needed if ``warmup`` is a fraction, in
            manual optimization, and where not every epoch has a validation, since only those count that have one.
        monitor: Name of the logged metric.
        mode: Whether the metric improves by becoming smaller ("min") or larger ("max").
        factor: Factor of each reduction, in [0, 1).
        patience: Number of epochs without improvement after which the next one reduces, at least 0.
        threshold: Smallest relative change that counts as an improvement, at least 0.
        warmup: W, length of the linear warm-up (int steps, float fraction).
        floor: Lowest factor of the base learning rate, in [0, 1].

    Returns:
        The dictionary for ``configure_optimizers``. In manual optimization call ``self.lr_schedulers().step(metric)``.
        In automatic optimization Lightning itself leaves out the metric of the epoch that a run is resumed in. Where no
        epoch ends before training does (``max_steps`` on a stream with ``val_check_interval``), validations count.

    Raises:
        ValueError: If a value is out of range.
        MisconfigurationException: In a fit without validation, if ``monitor`` is a metric of it ("val..."), or one that
            ends before its first validation.
        UnknownTotalSteps: If ``warmup`` is a fraction and the number of optimizer steps cannot be counted.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> reduce_on_plateau(optimizer, monitor="val_accuracy", mode="max")["lr_scheduler"]["scheduler"].mode
        'max'
    """
    check_arguments(optimizer, module)
    trainer = trainer_of(module)
    settings: dict[str, Any] = {"mode": mode, "factor": factor, "patience": patience, "threshold": threshold}
    check_settings({**settings, "monitor": monitor, "warmup": warmup, "floor": floor})
    total = count_steps(module, "reduce_on_plateau") if isinstance(warmup, float) and warmup else 1
    steps = whole_steps(warmup, total)
    announce_schedule(module)
    plain = {name: float(value) if isinstance(value, float) else value for name, value in settings.items()}  # no NumPy
    scheduler = PlateauLR(optimizer, warmup=steps, floor=float(floor), **plain)
    scheduler.duration = None if trainer is None else warmup
    config: LRSchedulerConfigType = {"scheduler": scheduler, "interval": "epoch", "frequency": 1}
    if module is None or module.automatic_optimization:
        config["monitor"] = monitor
        if trainer is not None:
            config["interval"], config["frequency"] = _occasions(trainer, monitor)
    return {"optimizer": optimizer, "lr_scheduler": config}


def _occasions(trainer: L.Trainer, monitor: str) -> tuple[str, int]:
    """How often Lightning steps the scheduler: after epochs with a validation, or after batches where no epoch ends.

    Raises:
        MisconfigurationException: If the scheduler would never step, or look for a metric that nothing logs.
    """
    interval, every = trainer.val_check_interval, trainer.check_val_every_n_epoch or 1  # None: validation by batches
    limited = isinstance(trainer.limit_train_batches, int)
    asks = isinstance(interval, int) or trainer.max_steps != -1
    batches = (train_batches_of_sizes(trainer, {1}) or {}).get(1) if asks else None
    steps = None if batches is None else every * -(-batches // trainer.accumulate_grad_batches)
    ends_before = steps is not None and 0 <= trainer.max_steps < steps
    if monitor.startswith("val") and not trainer.enable_validation:
        if ends_before:  # a trial of some steps
            return "epoch", every
        raise MisconfigurationException(
            f"reduce_on_plateau(monitor={monitor!r}) needs a validation, and this fit has none: pass val_dataloaders to"
            " trainer.fit, with a validation_step that logs it, or monitor a metric of training."
        )
    if ends_before and interval == 1.0:
        raise MisconfigurationException(
            f"reduce_on_plateau steps after a validation, and max_steps={trainer.max_steps} ends training before"
            f" the first one, after {steps} steps: pass Trainer(val_check_interval=...)."
        )
    if not ends_before and (batches is not None or limited or not isinstance(interval, int)):
        return "epoch", every
    after = interval if isinstance(interval, int) else max(1, int((batches or 1) * interval))
    if after % trainer.accumulate_grad_batches:
        raise MisconfigurationException(
            f"reduce_on_plateau steps after a validation that follows an optimizer step, got one after {after} batches"
            f" with accumulate_grad_batches={trainer.accumulate_grad_batches}: make val_check_interval a multiple of"
            " it."
        )
    return "step", after
