"""Tricks that fight, with each other or with Lightning's own: one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.settings import described
from lightning_tricks.core.trainer import callbacks_of, detects_anomaly, has_static_graph


class Conflict(NamedTuple):
    """A pair that fights.

    Args:
        tricks: Names of classes, or of settings of the Trainer; one of these ...
        others: ... with one of those.
        rule: What goes wrong, or with which settings.
        remedy: What to do.
        when: Of the two, whether it is so.
        warns: The combination has its uses, but is seldom meant.
    """

    tricks: tuple[str, ...]
    others: tuple[str, ...]
    rule: str
    remedy: str
    when: Callable[[Any, Any], bool] = lambda trick, other: True
    warns: bool = False


def _both(name: str) -> Callable[[Any, Any], bool]:
    return lambda trick, other: bool(getattr(trick, name) == getattr(other, name))


def _both_shown(trick: Any, other: Any) -> bool:
    return any("raw" not in (getattr(trick, name), getattr(other, name)) for name in ("validate", "at_end"))


def _whole_batches(trick: Any, module: Any) -> bool:
    split = getattr(getattr(module, "sam", None), "micro_batch_size", None) is not None
    return split and getattr(trick, "mode", "loss") == "loss"


CONFLICTS = (
    Conflict(
        ("EMA", "SWA"),
        ("EMA", "SWA"),
        "only one average can be validated, and only one be left in the module at the end: have validate and at_end"
        ' other than "raw"',
        'Set both to "raw" on all but one; averaged() and averaged_state_dict() of each give its weights',
        _both_shown,
    ),
    Conflict(
        ("EMA", "SWA"),
        ("WeightAveraging", "StochasticWeightAveraging"),
        "both put averaged weights into the module, for validation, checkpoints or at the end",
        "Leave one of them out",
    ),
    Conflict(
        ("RewindOnSpike",),
        ("WeightAveraging", "StochasticWeightAveraging"),
        "going back does not reach Lightning's averages, which keep the weights of the spike",
        "Use EMA or SWA of lightning_tricks, whose averages go back with the weights",
    ),
    Conflict(
        ("LRSchedule", "CurveLR", "PlateauLR"),
        ("StochasticWeightAveraging",),
        "it takes the schedule over when it starts, so that the curve never comes to its end",
        "Use SWA of lightning_tricks, with swa_tail for the learning rate of its epochs",
        warns=True,
    ),
    Conflict(("LRSchedule",), ("LRSchedule",), "both would set the learning rate", "Leave one of them out"),
    Conflict(
        ("LRSchedule",),
        ("schedule from configure_optimizers",),
        "both set the learning rate",
        "Leave one of them out",
    ),
    Conflict(
        ("SAMMixin",),
        ("static_graph",),
        "DDP's static graph allows no second run of a step",
        "Leave static_graph out",
    ),
    Conflict(
        ("HardExampleFilter", "HiddenMixup"),
        ("SAMMixin",),
        'the samples of a whole batch are compared (mode="loss") or mixed, and micro_batch_size runs parts of it',
        'Leave micro_batch_size out, or use mode="prune"',
        _whole_batches,
    ),
    Conflict(
        ("BatchSizeWarmup",),
        ("GradientAccumulationScheduler",),
        "both decide how many batches are accumulated",
        "Leave one of them out",
    ),
    Conflict(
        ("BatchSizeWarmup",),
        ("accumulate_grad_batches",),
        'with grow="accumulate" both say how many batches are accumulated',
        "Leave accumulate_grad_batches out and multiply start and end by it",
        lambda trick, _: bool(trick.grow == "accumulate"),
    ),
    Conflict(
        ("GradualUnfreeze",),
        ("BaseFinetuning",),
        "both freeze parameters and decide when they train",
        "Leave one of them out",
    ),
    Conflict(
        ("SkipNonFinite", "RewindOnSpike"),
        ("SpikeDetection",),
        "the losses of steps that are left out reach it all the same, and it ends the training",
        "Leave SpikeDetection out",
    ),
    Conflict(
        ("SkipNonFinite",),
        ("TerminateOnNonFinite",),
        "training stops at the first loss or gradient that is not finite, so that no step is ever left out",
        "Leave one of them out",
        warns=True,
    ),
    Conflict(
        ("SkipNonFinite", "RewindOnSpike"),
        ("detect_anomaly",),
        "the backward pass raises at the first NaN, before the step can be left out",
        "Leave detect_anomaly out when the cause is found",
        warns=True,
    ),
    Conflict(
        ("ActivationCheckpointing",),
        ("ActivationCheckpointing",),
        "both wrap the same blocks, which then run forward three times",
        "Leave one of them out, or name other blocks",
        _both("blocks"),
    ),
    Conflict(
        ("Compile",),
        ("Compile",),
        "both compile the same modules",
        "Leave one of them out, or name other modules",
        _both("modules"),
    ),
)


def check_conflicts(trainer: pl.Trainer, *, schedules: bool) -> None:
    """Find the pairs that fight.

    Args:
        trainer: A Trainer that fits.
        schedules: Look at those with a schedule from ``configure_optimizers``, or at the others.

    Raises:
        MisconfigurationException: For the first pair that cannot be right.
    """
    parts = list(_parts(trainer))
    pairs = list(permutations(parts, 2))
    if schedules:
        made = list(_schedules(trainer))
        pairs = [*product(parts, made), *product(made, parts)]
    for conflict in CONFLICTS:
        for one, other in pairs:
            if _fight(conflict, one, other):
                _tell(f"{one.label()} and {other.label()}: {conflict.rule}. {conflict.remedy}.", conflict.warns)
                break


def _tell(text: str, warns: bool) -> None:
    if not warns:
        raise MisconfigurationException(text)
    rank_zero_warn(text)


class _Part(NamedTuple):
    """Something that a fit is made of: the names that it goes by, itself, and what its user wrote."""

    names: frozenset[str]
    thing: Any
    written: str | None = None

    def label(self) -> str:
        if self.written is not None:
            return self.written
        ours = type(self.thing).__module__.startswith("lightning_tricks.")
        return described(self.thing) if ours else type(self.thing).__name__


def _fight(conflict: Conflict, one: _Part, other: _Part) -> bool:
    named = not one.names.isdisjoint(conflict.tricks) and not other.names.isdisjoint(conflict.others)
    return named and conflict.when(one.thing, other.thing)


def _parts(trainer: pl.Trainer) -> Iterator[_Part]:
    for callback in callbacks_of(trainer, Callback):
        yield _Part(_names(callback), callback)
    module = trainer.lightning_module
    yield _Part(_names(module), module, f"{type(module).__name__} with {getattr(module, 'sam', None)}")
    if (batches := trainer.accumulate_grad_batches) != 1:
        yield _Part(frozenset({"accumulate_grad_batches"}), trainer, f"Trainer(accumulate_grad_batches={batches})")
    if detects_anomaly(trainer):
        yield _Part(frozenset({"detect_anomaly"}), trainer, "Trainer(detect_anomaly=True)")
    if has_static_graph(trainer):
        yield _Part(frozenset({"static_graph"}), trainer, f"{type(trainer.strategy).__name__}(static_graph=True)")


def _schedules(trainer: pl.Trainer) -> Iterator[_Part]:
    brought = [getattr(callback, "brought", None) for callback in callbacks_of(trainer, Callback)]  # by LRSchedule
    for config in (each for each in trainer.lr_scheduler_configs if each not in brought):
        names = _names(config.scheduler) | {"schedule from configure_optimizers"}
        yield _Part(names, config.scheduler, f"{type(config.scheduler).__name__} from configure_optimizers")


def _names(thing: object) -> frozenset[str]:
    """The classes of this package and of Lightning that it is of, a user's subclass too."""
    return frozenset(
        each.__name__ for each in type(thing).__mro__ if each.__module__.startswith(("lightning_tricks.", "lightning."))
    )
