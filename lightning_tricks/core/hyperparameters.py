"""The active tricks among the hyperparameters of a run; apart from the fit's start, which asks for them once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import AttributeDict

from lightning_tricks.core.conflicts import Participant
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import callbacks_of


def participants(trainer: L.Trainer) -> list[Participant]:
    """The strategy, the callbacks and the schedules of this package that are active in a fit."""
    schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    everything = [trainer.strategy, *callbacks_of(trainer, Participant), *schedulers]
    return [each for each in everything if isinstance(each, Participant) and each.is_active(trainer)]


def hyperparameters(trainer: L.Trainer) -> dict[str, dict[str, Any]]:
    """The settings of the active tricks by their names, in plain data; a second one of a name has a number.

    Lengths are as they were given, not in steps, so that they stay the same when a run goes on with another plan.
    """
    found: dict[str, dict[str, Any]] = {}
    for trick in participants(trainer):
        name, settings = trick.given()
        same = sum(other.partition("-")[0] == name for other in found)
        found[f"{name}-{same + 1}" if same else name] = _plain(settings)
    return found


def tell_loggers(trainer: L.Trainer, undo: ExitStack) -> None:
    """Add the tricks to the hyperparameters that loggers get, under the name "tricks".

    Where the module has a "tricks" of its own, the name is "lightning_tricks". Lightning logs those of the module, and
    TensorBoard shows of several calls the first.
    """
    for logger in trainer.loggers:
        undo.callback(wrap_method(logger, "log_hyperparams", partial(_with_tricks, trainer, set())))


def _with_tricks(
    trainer: L.Trainer, taken: set[str], original: Any, params: Any = None, *args: Any, **kwargs: Any
) -> None:
    own = {} if params is None else params if isinstance(params, Mapping) else vars(params)
    taken.update(own)  # also by the calls before
    name = "lightning_tricks" if "tricks" in taken else "tricks"
    original(AttributeDict({**own, name: hyperparameters(trainer)}), *args, **kwargs)  # as Lightning gives them


def _plain(value: Any) -> Any:
    """A setting as data that every logger can write; of an object or a function its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool | int | float):
        return value
    return getattr(value, "__name__", type(value).__name__)
