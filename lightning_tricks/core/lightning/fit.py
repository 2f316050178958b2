"""The fit of a Trainer: where it began, what it plans, and the step of that plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_tricks.core.checks import duration_steps
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.steps import Plan, Span, UnknownTotalSteps, plan_of

__all__ = ["optimizer_steps"]

NAME = "lightning_tricks"  # of the fit among the counts of a fit loop


class Place(NamedTuple):
    """The place of a fit in its plan.

    Args:
        plan: The plan; None where steps cannot be counted.
        total: The number of optimizer steps that training ends with, in steps of the plan.
        taken: The number of optimizer steps that training had really taken when it last began with another plan.
        step: The step of the plan there.
    """

    plan: Plan | None = None
    total: int = 0
    taken: int = 0
    step: int = 0

    @property
    def offset(self) -> int:
        """What the step of the plan is ahead of ``global_step``."""
        return self.step - self.taken

    def planned(self, taken: float) -> float:
        """The step of the plan after so many real optimizer steps; those of an earlier plan are stretched to this one.

        Example:
            >>> place = Place(total=20, taken=20, step=10)
            >>> place.planned(10), place.planned(25)
            (5.0, 15)
        """
        if taken < self.taken:
            return taken * self.step / self.taken
        return taken - self.taken + self.step


class Fit(_BaseProgress):
    """The fits of one Trainer, as all tricks, presets and schedules see them.

    A fit is entered by the first of these that asks for it, and begins when the checkpoint is restored and the loaders
    are there. The step of the plan, ``global_step + offset``, is the planned number of steps before the position where
    the fit began, plus the steps taken since. So a curve goes on where it was, and ends where training ends, if a fit
    is interrupted and begun again, or resumed with other devices, accumulation, batches or limits.

    It is one of the counts of Lightning's fit loop, which are in every checkpoint, also in one that is saved after the
    fit, and are restored before training goes on.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.place = Place()
        self.undo = ExitStack()  # closed when the fit ends or fails
        self._trainer = trainer
        self.has_read_samplers = False  # a FitSampler asks where the fit is
        self.reading: Any = None  # that of the training loaders in the present fit or the last, if it is followed
        self.reading_ended = True
        self.is_trial = False  # whether the fit stands for another one, whose plan its schedules show
        self._entered = False
        self._begun = False
        self._restored = False  # whether the place is that of a checkpoint, from which no fit has begun yet
        self._unknown: tuple[str, str] | None = (
            None  # why steps cannot be counted and what to do, once the fit has begun
        )
        self._announce: Callable[[Place], None] | None = None
        wrap_method(trainer.fit_loop, "on_load_checkpoint", self._restore_loop)

    @property
    def total(self) -> int:
        """The number of steps of the plan; all ranks take part before the fit begins.

        Raises:
            UnknownTotalSteps: If the steps cannot be counted.
        """
        if self._begun:
            if self._unknown is not None:
                raise UnknownTotalSteps(*self._unknown)
            return self.place.total
        # A checkpoint is restored only when the fit begins, and its position may be one of another plan.
        position = (0, 0, 0) if self._trainer.ckpt_path else self._position()
        return max(1, plan_of(self._trainer).placed(*position)[0])

    def enter(self, announce: Callable[[Place], None]) -> bool:
        """Whether this is the first call in the present fit; ``announce`` is then called when the fit begins.

        It is called with the place of the checkpoint that was restored, or else of the Trainer's last fit.
        """
        if self._entered:
            return False
        self._entered, self._announce = True, announce
        self.undo.callback(wrap_method(self._trainer.fit_loop, "on_run_start", self._begin))
        self.undo.callback(wrap_method(self._trainer.strategy, "teardown", self._end))
        return True

    def _position(self) -> tuple[int, int, int]:
        """The epoch, the number of its batches and the number of optimizer steps that training begins after."""
        loop = self._trainer.fit_loop
        epochs: Any = loop.epoch_progress.current
        batches: Any = loop.epoch_loop.batch_progress.current
        # A fit that is begun again after an interruption repeats the epoch; a restored one goes on amid it.
        amid = loop.restarting and epochs.started > epochs.processed
        return epochs.processed, batches.processed if amid else 0, self._trainer.global_step

    def rescaled(self, before: Place, batches: int) -> int:
        """The batches of a restored epoch that count as done where it has so many: the same fraction of them."""
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        seen: int = progress.current.processed
        if progress.is_last_batch:
            return batches
        if before.plan is None or not before.plan.spans:
            return min(seen, batches)
        planned = before.plan.span_of(self._position()[0]).batches
        window = self._trainer.accumulate_grad_batches
        return seen if planned == batches else seen * batches // planned // window * window

    def _mend_progress(self, before: Place) -> None:
        """Have Lightning go on at the same fraction of a restored epoch that has another number of batches now.

        Lightning keeps the number of the batch. It would read on in an epoch that was over, or begin it again.
        """
        batches, loop = self._trainer.num_training_batches, self._trainer.fit_loop
        epochs: Any = loop.epoch_progress.current
        progress: Any = loop.epoch_loop.batch_progress
        if not loop.restarting:  # an interrupted epoch has begun twice in Lightning's counts, and does not end twice
            every: Any = (loop.epoch_progress.total, epochs, progress.total, progress.current)
            for counts in every:
                counts.ready = counts.started = counts.completed = counts.processed
            _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # with those of the loops in it
            loop.epoch_loop.reset_restart_stage()
        if not loop.restarting or batches == math.inf:
            return
        if loop.restarted_mid_epoch and epochs.started == epochs.processed:
            loop.reset_restart_stage()  # the epoch was over: Lightning would leave the hooks of the next one out
        done = None if self.reading is None else self.reading.batches_done
        change = (self.rescaled(before, int(batches)) if done is None else done) - progress.current.processed
        for count in ("ready", "started", "processed", "completed"):
            setattr(progress.current, count, getattr(progress.current, count) + change)

    def _restore_loop(self, original: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
        """Have Lightning make loaders anew that were made before the checkpoint is restored.

        ``estimated_stepping_batches`` makes them in ``configure_optimizers``. They have begun at the beginning by then,
        and their workers have read ahead there. A user's callback may restore the loop amid a fit, which reads on.
        Those that have no position to go on from are left alone: a second start would draw random numbers again.
        """
        loop = self._trainer.fit_loop
        states = state_dict.get("state_dict", {}).get("combined_loader")
        goes_on = self.reading is not None or self.has_read_samplers or bool(states)
        if loop._combined_loader is not None and not self._begun and goes_on:
            loop.teardown()  # ends their workers
            loop._combined_loader = None
            vars(loop.epoch_loop.batch_progress.current).pop("orders", None)  # of a FitSampler that was read by then
        original(state_dict)

    def _begin(self, original: Callable[[], None]) -> None:
        restored = self._restored
        before = self.place if restored or not self._trainer.fit_loop.restarting else Place()
        if self.reading_ended:
            self.reading = None
        self._mend_progress(before)
        self._restored, self._unknown = False, None
        try:
            plan = plan_of(self._trainer)
        except UnknownTotalSteps as error:
            self.place, self._unknown = Place(), (error.reason, error.otherwise)
        else:
            if not restored or plan != before.plan:
                position = self._position()
                total, step = plan.placed(*position)
                self.place = Place(plan, total, position[-1], step)
        self._begun = True
        if self._announce is not None:
            self._announce(before)
        original()
        if self.reading is not None:
            self.reading.began()

    def _end(self, original: Callable[[], None]) -> None:
        self._entered = self._begun = self.is_trial = False
        self._announce = None
        self.reading_ended = True
        self.undo.close()
        original()

    @override
    def state_dict(self) -> dict[str, Any]:
        plan = self.place.plan
        saved = {**self.place._asdict(), "plan": plan and [[list(span) for span in plan.spans], *plan[1:]]}
        reading = None if self.reading is None else self.reading.save()  # also that of a fit that has ended
        return saved if reading is None else {**saved, "reading": reading}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        place = {**state_dict}
        reading, saved = place.pop("reading", None), place.pop("plan")
        plan = saved and Plan(tuple(Span(*span) for span in saved[0]), *saved[1:])
        self.place, self._restored = Place(plan, **place), True
        if not self.reading_ended:
            self.reading.load(reading)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the Trainer makes its own


def fit_of(trainer: L.Trainer) -> Fit:
    """The fits of a Trainer."""
    fit = getattr(trainer.fit_loop, NAME, None)
    if fit is None:
        fit = Fit(trainer)
        setattr(trainer.fit_loop, NAME, fit)
    return fit


def reading_of(trainer: L.Trainer) -> Any:
    """The reading of the training loaders in the present fit, if it is followed; else None."""
    fit = getattr(trainer.fit_loop, NAME, None)
    return None if fit is None or fit.reading_ended else fit.reading


def plan_step(trainer: L.Trainer) -> int:
    """The step of the plan that the Trainer's fit is at; equal to ``global_step`` while no fit has changed its plan."""
    return trainer.global_step + fit_of(trainer).place.offset


def optimizer_steps(trainer: L.Trainer) -> int:
    """The exact number of optimizer steps of this fit, first epoch to last, including those before a resume.

    ``min(max_steps, sum_e ceil(B_e / a_e))`` with ``B_e`` training batches and accumulation ``a_e`` in epoch e. Counts
    limits, distributed samplers and ragged windows; reads nothing from the loaders, starts no workers and leaves the
    random generators as they were (a ``train_dataloader`` hook is called once more). What ends training early, such as
    EarlyStopping, is not foreseen. The count is the planned one under the present settings, also for steps that were
    taken with other ones; Lightning itself loses steps in two resumes, with ``max_steps`` from the checkpoint of an
    epoch's end, and with GradientAccumulationScheduler in mid-epoch. To be called from ``configure_optimizers`` or
    later.

    Args:
        trainer: The Trainer, attached to a module and its data.

    Returns:
        The total, at least 1, the same on every rank and after a resume.

    Raises:
        UnknownTotalSteps: If the loaders have no trustworthy length, or neither a number of epochs nor of
            steps ends training.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Net(BoringModel):
        ...     def configure_optimizers(self):
        ...         print(optimizer_steps(self.trainer))
        ...         return super().configure_optimizers()
        >>> trainer = L.Trainer(
        ...     max_epochs=2, limit_train_batches=5, accumulate_grad_batches=2, limit_val_batches=0, accelerator="cpu",
        ...     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(Net())
        6
    """
    require_same_lightning(trainer, "optimizer_steps")
    return fit_of(trainer).total


def steps_of(trainer: L.Trainer, duration: int | float, trick: str, name: str) -> float:
    """The step of the plan at which a duration (int steps, or float fraction of training) ends, not rounded.

    Raises:
        MisconfigurationException: For a fraction of a training whose length is unknown.
    """
    fit = fit_of(trainer)
    if isinstance(duration, int) or duration == 0:
        return fit.place.planned(duration)
    try:
        return duration_steps(duration, fit.total)
    except UnknownTotalSteps as error:
        raise MisconfigurationException(
            f"{trick}({name}={duration}) is a fraction of a training whose length is unknown: {error.reason}. Give"
            f" {name} in optimizer steps (an int)."
        ) from error
