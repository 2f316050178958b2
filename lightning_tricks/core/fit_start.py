"""The start of a fit: the check of what takes part in it, and the table of active tricks."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities import rank_zero_info

from lightning_tricks.core.conflicts import Participant, check_conflicts, check_schedule_conflicts
from lightning_tricks.core.hyperparameters import participants, tell_loggers
from lightning_tricks.core.lightning.fit import Place, fit_of
from lightning_tricks.core.lightning.step_watch import refuse_steps_past_hooks
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.core.lightning.trainer import callbacks_of, is_fitting
from lightning_tricks.core.report import active_tricks, spelled_rows


def announce(trainer: L.Trainer) -> None:
    """Let a fit know of a trick, a schedule or a strategy; the first one has it checked and reported.

    Raises:
        MisconfigurationException: If two tricks conflict.
    """
    if is_fitting(trainer) and fit_of(trainer).enter(partial(_begin, trainer)):
        check_conflicts(trainer)
        tell_loggers(trainer, fit_of(trainer).undo)


def _begin(trainer: L.Trainer, before: Place) -> None:
    """Check what a fit brings when it begins, and report what is active in it."""
    check_schedule_conflicts(trainer)
    for config in trainer.lr_scheduler_configs:
        if (occasion := getattr(config.scheduler, "occasion", None)) is not None:
            config.interval, config.frequency = occasion  # who returned it may not know what it counts
    fit = fit_of(trainer)
    schedules: list[Any] = [] if fit.is_trial else _schedules(trainer)
    for schedule in schedules:
        schedule.follow(fit.place, before, trainer.global_step)
    if before.plan and fit.place.plan and (before.total, before.offset) != (fit.place.total, fit.place.offset):
        rank_zero_info(_changed_plan(trainer, before, fit.place, schedules))
    needy = [type(each).__name__ for each in callbacks_of(trainer, Participant) if each.needs_step_hooks]
    if needy:
        refuse_steps_past_hooks(trainer, " and ".join(dict.fromkeys(needy)), fit.undo)
    for logger in trainer.loggers:
        logger.log_hyperparams({})  # again with what has joined, or since the module logs none of its own
    if callbacks_of(trainer, ModelSummary):  # trial fits have none, and report nothing
        rank_zero_info(active_tricks(active(trainer), _total_steps(trainer)))


def _changed_plan(trainer: L.Trainer, before: Place, now: Place, schedules: list[Any]) -> str:
    """The line that tells of another plan than that of the checkpoint, or of the Trainer's last fit."""
    step = trainer.global_step + now.offset
    rates = [(schedule.lr_at(step), schedule.lr_at(now.total)) for schedule in schedules if hasattr(schedule, "lr_at")]
    told = [f", with a learning rate of {first:g} now and {last:g} at the end" for first, last in rates]
    return (
        f"The plan of training has changed from {before.total} to {now.total} optimizer steps, of which"
        f" {now.total - step} are left{' and'.join(told)}."
    )


def active(trainer: L.Trainer) -> list[tuple[str, str]]:
    """The active tricks of a fit with their settings; fractions of training in optimizer steps."""
    rows = [(trick.row(trainer), trick.durations) for trick in participants(trainer)]
    return spelled_rows(rows, _total_steps(trainer))


def _schedules(trainer: L.Trainer) -> list[Participant]:
    """The schedules of this package."""
    schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [scheduler for scheduler in schedulers if isinstance(scheduler, Participant)]


def _total_steps(trainer: L.Trainer) -> int | None:
    try:
        return fit_of(trainer).total
    except UnknownTotalSteps:
        return None
