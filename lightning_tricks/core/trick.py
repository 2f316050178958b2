"""The base class of every callback: undoing its changes, checks at the start of a fit, and conflicts of tricks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelSummary
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.fit import Place, fit_of, steps_of
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.step_watch import refuse_steps_past_hooks
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.core.lightning.trainer import (
    callbacks_of,
    data_parallel,
    detects_anomaly,
    has_static_graph,
    is_fitting,
)
from lightning_tricks.core.report import Row, active_tricks, curve_row, described, settings, spelled_rows
from lightning_tricks.core.safe_load.damage import require_undamaged_file


class Conflict(NamedTuple):
    """A combination that is wrong, or seldom meant.

    Args:
        others: Names of classes, which include their subclasses, or of settings of the Trainer.
        rule: The reason, as a clause.
        remedy: The remedy, as a sentence without its full stop.
        when: Function of the trick and the other object: whether their settings conflict.
        warns: Whether it only warns, since the combination has its uses.
    """

    others: tuple[str, ...]
    rule: str
    remedy: str
    when: Callable[[Any, Any], bool] = lambda trick, other: True
    warns: bool = False


class Trick(Callback):
    """A callback of this package.

    It undoes every change that it makes outside of itself through one stack, which is closed when the fit ends, fails
    or is followed by another. A subclass that overrides one of the hooks below calls ``super()``'s hook.
    """

    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    durations: ClassVar[tuple[str, ...]] = ()  # names of the arguments that are durations
    needs_step_hooks: ClassVar[bool] = False  # whether its hooks must run before every optimizer step
    changes_network: ClassVar[bool] = False  # whether a fit without it trains another network, as a trial would

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._steps: dict[str, Any] = {}  # the durations in steps of the plan, once training has started

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        require_same_lightning(trainer, self.written())
        self._close()
        announce(trainer)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if callbacks_of(trainer, Trick)[0] is self:  # the file is read once
            require_undamaged_file(trainer.ckpt_path)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps = {name: self._in_steps(trainer, name, getattr(self, name)) for name in self.durations}

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        try:
            self._on_failure(trainer)
        except Exception as error:  # must not hide the original exception
            note = f"{type(self).__name__} could not undo everything that it had changed: {error}"
            exception.add_note(note) if hasattr(exception, "add_note") else rank_zero_warn(note)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def is_active(self, trainer: pl.Trainer) -> bool:
        """Whether this trick does anything in the present fit."""
        return True

    def row(self, trainer: pl.Trainer) -> Row:
        """The name and the settings of this trick in the table of active tricks."""
        return type(self).__name__, settings(self, always=self.durations)

    def written(self) -> str:
        """This trick as its user wrote it, for error messages."""
        return described(self)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Wrap a method until this trick is closed."""
        self._undo.callback(wrap_method(owner, name, wrapper))

    def _on_failure(self, trainer: pl.Trainer) -> None:
        """Restore the module and the Trainer after an exception."""
        self._close()

    def _close(self) -> None:
        """Undo everything that this trick has changed outside of itself."""
        self._undo.close()

    def _in_steps(self, trainer: pl.Trainer, name: str, duration: Any) -> Any:
        """A duration in steps of the plan, not rounded; a ``stop`` of 1.0 is never reached."""
        if name == "stop" and isinstance(duration, float) and duration == 1:
            return math.inf
        return steps_of(trainer, duration, type(self).__name__, name)

    def _arguments(self) -> dict[str, Any]:
        """The arguments that this trick was made with, which are stored under their own names."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __reduce__(self) -> Any:
        """Make a new trick with the same arguments of a copy or a pickle, which is of no fit, Trainer or module."""
        return _made, (type(self), self._arguments())


def _made(kind: type[Trick], arguments: dict[str, Any]) -> Trick:
    return kind(**arguments)


def announce(trainer: pl.Trainer) -> None:
    """Let a fit know of a trick, a schedule or a strategy; the first one has it checked and reported.

    Raises:
        MisconfigurationException: If two tricks conflict.
    """
    if is_fitting(trainer) and fit_of(trainer).enter(partial(_begin, trainer)):
        check_conflicts(trainer)


def _begin(trainer: pl.Trainer, before: Place) -> None:
    """Check what a fit brings when it begins, and report what is active in it."""
    check_schedule_conflicts(trainer)
    fit = fit_of(trainer)
    configs = [] if fit.is_trial else trainer.lr_scheduler_configs
    schedules: list[Any] = [config.scheduler for config in configs if _is_ours(config.scheduler)]
    for schedule in schedules:
        schedule.follow(fit.place, before, trainer.global_step)
    if before.plan and fit.place.plan and (before.total, before.offset) != (fit.place.total, fit.place.offset):
        rank_zero_info(_changed_plan(trainer, before, fit.place, schedules))
    if blind := [type(trick).__name__ for trick in callbacks_of(trainer, Trick) if trick.needs_step_hooks]:
        refuse_steps_past_hooks(trainer, " and ".join(dict.fromkeys(blind)), fit.undo)
    if callbacks_of(trainer, ModelSummary):  # trial fits have none, and report nothing
        rank_zero_info(active_tricks(active(trainer), _total_steps(trainer)))


def _changed_plan(trainer: pl.Trainer, before: Place, now: Place, schedules: list[Any]) -> str:
    """The line that tells of another plan than that of the checkpoint, or of the Trainer's last fit."""
    step = trainer.global_step + now.offset
    rates = [(schedule.lr_at(step), schedule.lr_at(now.total)) for schedule in schedules if hasattr(schedule, "lr_at")]
    told = [f", with a learning rate of {first:g} now and {last:g} at the end" for first, last in rates]
    return (
        f"The plan of training has changed from {before.total} to {now.total} optimizer steps, of which"
        f" {now.total - step} are left{' and'.join(told)}."
    )


# -- the table of active tricks ---------------------------------------------------------------------------------------


def active(trainer: pl.Trainer) -> list[tuple[str, str]]:
    """The active tricks of a fit with their settings; fractions of training in optimizer steps."""
    total, tricks = _total_steps(trainer), [trick for trick in callbacks_of(trainer, Trick) if trick.is_active(trainer)]
    rows: list[tuple[Row, tuple[str, ...]]] = []
    if _is_ours(trainer.strategy):
        given = {name: value for name, value in settings(trainer.strategy).items() if name != "config"}  # too long
        rows.append(((getattr(trainer.strategy, "strategy_name", ""), given), ()))
    rows += [(trick.row(trainer), trick.durations) for trick in tricks]
    for config in trainer.lr_scheduler_configs:
        if _is_ours(config.scheduler):
            rows.append((curve_row(config.scheduler.settings), ()))  # type: ignore[union-attr]
    return spelled_rows(rows, total)


def _is_ours(thing: object) -> bool:
    return type(thing).__module__.startswith("lightning_tricks.")


def _total_steps(trainer: pl.Trainer) -> int | None:
    try:
        return fit_of(trainer).total
    except UnknownTotalSteps:
        return None


# -- conflicts --------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A part of a fit: the object, its names in conflicts, and its form in the user's code."""

    thing: Any
    names: frozenset[str]
    written: str


def check_conflicts(trainer: pl.Trainer) -> None:
    """Check the callbacks, the module and the settings of a Trainer against one another.

    Raises:
        MisconfigurationException: For the first combination that is wrong.
    """
    parts = [*_callbacks(trainer), *_trainer_settings(trainer)]
    _check((one, other) for one, other in product(parts, parts) if one is not other)


def check_schedule_conflicts(trainer: pl.Trainer) -> None:
    """Check the schedules of ``configure_optimizers`` against everything else.

    Raises:
        MisconfigurationException: For the first combination that is wrong.
    """
    parts, schedules = [*_callbacks(trainer), *_trainer_settings(trainer)], list(_schedules(trainer))
    _check([*product(parts, schedules), *product(schedules, parts)])


def _check(pairs: Any) -> None:
    for one, other in pairs:
        for conflict in getattr(type(one.thing), "conflicts", ()):
            if not other.names.isdisjoint(conflict.others) and conflict.when(one.thing, other.thing):
                text = f"{one.written} and {other.written}: {conflict.rule}. {conflict.remedy}."
                if not conflict.warns:
                    raise MisconfigurationException(text)
                rank_zero_warn(text)


def _callbacks(trainer: pl.Trainer) -> Iterator[_Part]:
    for callback in callbacks_of(trainer, Callback):
        if not isinstance(callback, Trick):
            yield _Part(callback, _names(callback), type(callback).__name__)
        elif callback.is_active(trainer):
            yield _Part(callback, _names(callback), callback.written())


def _trainer_settings(trainer: pl.Trainer) -> Iterator[_Part]:
    strategy, batches = type(trainer.strategy).__name__, trainer.accumulate_grad_batches
    sharded = engine_of(trainer) is Engine.FSDP2
    parts = trainer.world_size // data_parallel(trainer)[1] if sharded else 1  # Processes that share a batch.
    found: Mapping[str, tuple[bool, str]] = {
        "accumulate_grad_batches": (batches != 1, f"Trainer(accumulate_grad_batches={batches})"),
        "detect_anomaly": (detects_anomaly(trainer), "Trainer(detect_anomaly=True)"),
        "tensor_parallel": (parts > 1, f"{strategy}(tensor_parallel={parts})"),
        "static_graph": (has_static_graph(trainer), f"{strategy}(static_graph=True)"),
    }
    for name, (is_set, text) in found.items():
        if is_set:
            yield _Part(trainer, frozenset({name}), text)


def _schedules(trainer: pl.Trainer) -> Iterator[_Part]:
    callbacks = callbacks_of(trainer, Trick)
    for config in trainer.lr_scheduler_configs:
        if any(config.scheduler is value for callback in callbacks for value in vars(callback).values()):
            continue  # a part of the callback that has made it
        text = f"{type(config.scheduler).__name__} from configure_optimizers"
        names = _names(config.scheduler) | {"schedule from configure_optimizers"}
        yield _Part(config.scheduler, names, text)


def _names(thing: object) -> frozenset[str]:
    """The names of an object's classes, base classes included, of this package and of Lightning."""
    ours = ("lightning_tricks.", "lightning.pytorch.", "lightning.fabric.")
    return frozenset(kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith(ours))
