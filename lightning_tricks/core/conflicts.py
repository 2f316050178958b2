"""Conflicts of tricks: what a class declares, and the check of all that takes part in a fit against one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, ClassVar, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.trainer import callbacks_of, data_parallel, detects_anomaly, has_static_graph
from lightning_tricks.core.report import Row, described, settings


class Conflict(NamedTuple):
    """A combination that is wrong, or seldom meant.

    Args:
        others: Names of classes, which include their subclasses, or of settings of the Trainer.
        rule: The reason, as a clause.
        remedy: What to do instead, as a sentence without its full stop; by default "Remove one of them".
        when: Function of the trick and the other object: whether their settings conflict.
        warns: Whether it only warns, since the combination has its uses.
    """

    others: tuple[str, ...]
    rule: str
    remedy: str = "Remove one of them"
    when: Callable[[Any, Any], bool] = lambda trick, other: True
    warns: bool = False


class Participant:
    """A callback, a strategy or a schedule of this package, as a fit knows it."""

    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    durations: ClassVar[tuple[str, ...]] = ()  # names of the arguments that are durations
    needs_step_hooks: ClassVar[bool] = False  # whether its hooks must run before every optimizer step

    def is_active(self, trainer: L.Trainer) -> bool:
        """Whether it does anything in the present fit."""
        return True

    def given(self) -> Row:
        """Its name and settings as they were given, which loggers get as hyperparameters."""
        return type(self).__name__, settings(self, always=self.durations)

    def row(self, trainer: L.Trainer) -> Row:
        """Its name and settings in the table of active tricks."""
        return self.given()

    def written(self) -> str:
        """Its form in the user's code, for error messages."""
        return described(self)


class _Part(NamedTuple):
    """A part of a fit: the object, its names in conflicts, and its form in the user's code."""

    thing: Any
    names: frozenset[str]
    written: str


def check_conflicts(trainer: L.Trainer) -> None:
    """Check the callbacks, the strategy and the settings of a Trainer against one another.

    Raises:
        MisconfigurationException: For the first combination that is wrong.
    """
    parts = list(_parts(trainer))
    _check((one, other) for one, other in product(parts, parts) if one is not other)


def check_schedule_conflicts(trainer: L.Trainer) -> None:
    """Check the schedules of ``configure_optimizers`` against everything else.

    Raises:
        MisconfigurationException: For the first combination that is wrong.
    """
    parts, schedules = list(_parts(trainer)), list(_schedules(trainer))
    _check([*product(parts, schedules), *product(schedules, parts)])


def _check(pairs: Iterable[tuple[_Part, _Part]]) -> None:
    for one, other in pairs:
        for conflict in one.thing.conflicts if isinstance(one.thing, Participant) else ():
            if not other.names.isdisjoint(conflict.others) and conflict.when(one.thing, other.thing):
                text = f"{one.written} and {other.written}: {conflict.rule}. {conflict.remedy}."
                if not conflict.warns:
                    raise MisconfigurationException(text)
                rank_zero_warn(text)


def _parts(trainer: L.Trainer) -> Iterator[_Part]:
    for thing in (*callbacks_of(trainer, Callback), trainer.strategy):
        if not isinstance(thing, Participant):
            yield _Part(thing, _names(thing), type(thing).__name__)
        elif thing.is_active(trainer):
            yield _Part(thing, _names(thing), thing.written())
    for name, (is_set, written) in _settings(trainer).items():
        if is_set:
            yield _Part(trainer, frozenset({name}), written)


def _settings(trainer: L.Trainer) -> Mapping[str, tuple[bool, str]]:
    """The settings that conflicts name: whether they are set, and how."""
    strategy, batches = type(trainer.strategy).__name__, trainer.accumulate_grad_batches
    sharded = engine_of(trainer) is Engine.FSDP2
    processes = trainer.world_size // data_parallel(trainer)[1] if sharded else 1  # those that share a batch
    return {
        "accumulate_grad_batches": (batches != 1, f"Trainer(accumulate_grad_batches={batches})"),
        "detect_anomaly": (detects_anomaly(trainer), "Trainer(detect_anomaly=True)"),
        "tensor_parallel": (processes > 1, f"{strategy}(tensor_parallel={processes})"),
        "static_graph": (has_static_graph(trainer), f"{strategy}(static_graph=True)"),
    }


def _schedules(trainer: L.Trainer) -> Iterator[_Part]:
    callbacks = callbacks_of(trainer, Participant)
    for config in trainer.lr_scheduler_configs:
        if any(config.scheduler is value for callback in callbacks for value in vars(callback).values()):
            continue  # a part of the callback that has made it
        written = f"{type(config.scheduler).__name__} from configure_optimizers"
        names = _names(config.scheduler) | {"schedule from configure_optimizers"}
        yield _Part(config.scheduler, names, written)


def _names(thing: object) -> frozenset[str]:
    """The names of an object's classes, base classes included, of this package and of Lightning."""
    ours = ("lightning_tricks.", "lightning.pytorch.", "lightning.fabric.")
    return frozenset(kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith(ours))
