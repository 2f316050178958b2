"""Schedules whose lengths are those of a fit's plan, in the dictionary that Lightning expects."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch.optim import Optimizer

from lightning_tricks.core.fit_start import announce
from lightning_tricks.core.lightning.fit import Place
from lightning_tricks.core.lightning.optimizer_groups import is_schedule_free
from lightning_tricks.core.lightning.trainer import trainer_of
from lightning_tricks.schedules import curves
from lightning_tricks.schedules.arguments import check_arguments, check_settings, count_steps, in_steps
from lightning_tricks.schedules.scheduler import Curve, CurveLR

Schedule = OptimizerLRSchedulerConfig


def announce_schedule(module: L.LightningModule | None) -> None:
    """Let the fit that a module is in know of a schedule."""
    if (trainer := trainer_of(module)) is not None:
        announce(trainer)


def planned_schedule(
    curve: Callable[..., float],
    optimizer: Optimizer,
    module: L.LightningModule | None,
    total_steps: int | None,
    *,
    momentum: tuple[float, float] | None = None,
    endless: bool = False,
    **settings: Any,
) -> Schedule:
    """Make the dictionary of a factory; T is left unknown where an endless curve does not need it."""
    check_arguments(optimizer, module)
    if is_schedule_free(optimizer):
        raise ValueError(
            f"optimizer: a schedule-free optimizer takes no schedule, got {type(optimizer).__name__}: return it alone,"
            " and add the callback ScheduleFree()."
        )
    optional = {"total_steps": total_steps, "momentum": momentum}
    check_settings({**settings, **{name: value for name, value in optional.items() if value is not None}})
    endless = endless and total_steps is None and isinstance(settings["warmup"], int)
    counts, trainer = total_steps is None, trainer_of(module)
    bind = partial(_bound, curve, settings, momentum, endless)
    total = max(1, settings["warmup"]) if endless else total_steps or count_steps(module, curve.__name__)
    # The plan of a checkpoint, in which there may have been more steps, is known when the fit begins.
    resumes = trainer is not None and bool(trainer.ckpt_path)
    bound, cycled = bind(Place(total=total), is_trial=counts and (resumes or _is_trial(trainer)))
    announce_schedule(module)
    scheduler = CurveLR(optimizer, bound, momentum=cycled)
    scheduler.rebind = partial(bind, is_trial=counts and _is_trial(trainer))
    scheduler.follows = counts and trainer is not None
    scheduler.occasion = ("step", 1) if scheduler.follows else None
    scheduler.arguments = {"curve": curve.__name__, **optional, **settings}
    return in_dictionary(scheduler)


def _bound(
    curve: Callable[..., float],
    settings: dict[str, Any],
    momentum: tuple[float, float] | None,
    endless: bool,
    place: Place,
    *,
    is_trial: bool,
) -> tuple[Curve, Curve | None]:
    """A curve, and that of the momentum, with lengths in steps of the plan."""
    if endless:
        place = place._replace(total=max(1, math.ceil(place.planned(settings["warmup"]))))
    steps = in_steps(settings, place, is_trial)
    cycled = None
    if momentum is not None:
        low, high = map(float, momentum)
        cycled = partial(curves.one_cycle_momentum, total_steps=place.total, warmup=steps["warmup"], low=low, high=high)
    return partial(curve, total_steps=None if endless else place.total, **steps), cycled


def _is_trial(trainer: L.Trainer | None) -> bool:
    """Whether a fit is a trial of the training that durations in steps were chosen for."""
    return trainer is not None and bool(trainer.fast_dev_run or trainer.overfit_batches > 0)  # type: ignore[attr-defined]


def in_dictionary(scheduler: CurveLR) -> Schedule:
    """The dictionary for ``configure_optimizers`` of a scheduler that steps with the optimizer."""
    config: LRSchedulerConfigType = {"scheduler": scheduler, "interval": "step", "frequency": 1}
    return {"optimizer": scheduler.optimizer, "lr_scheduler": config}
