"""What every fit with a trick begins with: tricks that fight are found, and a table says which are active."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelSummary
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_tricks.core.conflicts import check_conflicts
from lightning_tricks.core.settings import settings
from lightning_tricks.core.steps import UnknownTotalSteps, optimizer_steps
from lightning_tricks.core.table import table
from lightning_tricks.core.trainer import callbacks_of, is_fitting

Row = tuple[str, Mapping[str, Any]]  # a name and settings
_DURATIONS = ("start", "stop", "at")  # a float among them is a fraction of training


class Trick(Callback):
    """A callback of this package."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        begin(trainer)

    def row(self, trainer: pl.Trainer) -> Row | None:
        """Its row in the table, if it is active."""
        return type(self).__name__, settings(self, always=_DURATIONS)


def begin(trainer: pl.Trainer) -> None:
    """Call it where a trick is set up for a fit; the first call of a fit counts.

    Raises:
        MisconfigurationException: If two tricks fight.
    """
    if is_fitting(trainer) and not callbacks_of(trainer, _Beginning):
        check_conflicts(trainer, schedules=False)
        # the first, so that it sees the schedules of configure_optimizers before LRSchedule brings its own
        trainer.callbacks = [_Beginning(), *trainer.callbacks]  # type: ignore[attr-defined]


class _Beginning(Callback):
    """Is among the Trainer's callbacks until training starts."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_conflicts(trainer, schedules=True)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._leave(trainer)
        if callbacks_of(trainer, ModelSummary):  # of which the table is a part; trials have none
            rank_zero_info(summary(trainer))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave(trainer)  # of a fit that has nothing to train

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave(trainer)

    def _leave(self, trainer: pl.Trainer) -> None:
        # a new list: Lightning goes through the old one
        trainer.callbacks = [each for each in callbacks_of(trainer, Callback) if each is not self]  # type: ignore[attr-defined]


def summary(trainer: pl.Trainer) -> str:
    """The table of the active tricks of a fit."""
    total = _total(trainer)
    steps = "" if total is None else f", {total} optimizer steps"
    return f"\nActive tricks{steps}\n" + table(("trick", "settings"), active(trainer))


def active(trainer: pl.Trainer) -> list[tuple[str, str]]:
    """The active tricks of a fit, each with its settings, in optimizer steps where they are fractions of training."""
    total = _total(trainer)
    resolved = [(name, _resolved(given, total)) for name, given in _tricks(trainer)]
    return [(name, _spelled(given)) for name, given in (*resolved, *_schedules(trainer))]


def _tricks(trainer: pl.Trainer) -> Iterator[Row]:
    if _is_ours(trainer.strategy):
        yield getattr(trainer.strategy, "strategy_name", ""), settings(trainer.strategy)
    for trick in callbacks_of(trainer, Trick):
        if (row := trick.row(trainer)) is not None:
            yield row


def _schedules(trainer: pl.Trainer) -> Iterator[Row]:
    for config in trainer.lr_scheduler_configs:
        if _is_ours(config.scheduler):
            yield _curve(config.scheduler.settings)  # type: ignore[union-attr]


def _is_ours(thing: object) -> bool:
    return type(thing).__module__.startswith("lightning_tricks.")


def _curve(given: Mapping[str, Any]) -> Row:
    return given["curve"], {name: value for name, value in given.items() if name != "curve"}


def _total(trainer: pl.Trainer) -> int | None:
    try:
        return optimizer_steps(trainer)
    except UnknownTotalSteps:
        return None


def _resolved(given: Mapping[str, Any], total: int | None) -> dict[str, Any]:
    """Settings with the steps that fractions of training stand for; as they are if the total is unknown."""

    def steps(value: Any) -> Any:
        if isinstance(value, float) and total is not None:
            return f"{math.ceil(value * total)} of {total}"
        return [steps(each) for each in value] if isinstance(value, Sequence) else value

    return {name: steps(value) if name in _DURATIONS else value for name, value in given.items()}


def _spelled(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in given.items() if value not in (None, (), []))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):  # a curve inside another, or DeepSpeed's configuration
        name, rest = _curve(value) if "curve" in value else ("", value)
        return f"{name} ({_spelled(rest)})".lstrip()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
