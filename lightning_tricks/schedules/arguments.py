"""Arguments of schedules: they are checked, T is counted from a fit, and durations become steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import lightning as L
from torch.optim import Optimizer

from lightning_tricks.core.checks import (
    MOST,
    check_choice,
    check_count,
    check_duration,
    check_range,
    check_type,
    duration_steps,
)
from lightning_tricks.core.lightning.fit import Place, fit_of
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.core.lightning.trainer import trainer_of
from lightning_tricks.schedules import curves

Duration = int | float  # optimizer steps, or a fraction of training


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_milestones(name: str, milestones: Sequence[Duration]) -> None:
    if isinstance(milestones, str | bytes) or not isinstance(milestones, Sequence):
        raise TypeError(f"{name} must be a list of ints (steps) and floats (fractions), got {milestones!r}.")
    for milestone in milestones:
        check_duration(name, milestone)


def _check_momentum(name: str, pair: tuple[float, float]) -> None:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(f"{name} must be two numbers, lowest and highest, for example (0.85, 0.95), got {pair!r}.")
    for momentum in pair:
        check_range(name, momentum, 0.0, 1.0, below=True)
    if pair[0] > pair[1]:
        raise ValueError(f"{name} must have the lowest first and the highest second, got {pair!r}: swap them.")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "total_steps": check_count,
    **dict.fromkeys(("warmup", "flat", "cooldown", "start", "anneal"), check_duration),
    "milestones": _check_milestones,
    "momentum": _check_momentum,
    **dict.fromkeys(("floor", "gamma", "initial"), partial(check_range, low=0.0, high=1.0)),
    "factor": partial(check_range, low=0.0, high=1.0, below=True),
    **dict.fromkeys(("power", "swa_lr", "threshold"), partial(check_range, low=0.0)),
    "cycles": check_count,
    "growth": partial(check_range, low=1.0),
    "patience": partial(check_count, least=0),
    "shape": partial(check_choice, allowed=curves.COOLDOWNS),
    "mode": partial(check_choice, allowed=("min", "max")),
    "monitor": lambda name, value: check_type(name, value, str),
}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise for an argument of a factory, given by its name, that is out of range by itself."""
    for name, value in settings.items():
        _CHECKS[name](name, value)
    cycles, growth = settings.get("cycles", 1), settings.get("growth", 1.0)
    if cycles > 1000 or cycles * math.log(growth) > 700:  # exp(710) is too large for a float
        raise ValueError(
            f"cycles must be at most 1000, and growth**cycles a number, got cycles={cycles}, growth={growth}."
        )


def check_arguments(optimizer: Optimizer, module: L.LightningModule | None) -> None:
    """Raise unless they are an optimizer and a module, in this order."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer (module comes second), got {optimizer!r}.")
    require_same_lightning(module, "A schedule")
    if module is not None and not isinstance(module, L.LightningModule):
        raise TypeError(f"module must be a LightningModule, got {type(module).__name__}.")


# -- durations --------------------------------------------------------------------------------------------------------

ROUNDING = 1e-9  # steps; as floats, 0.2 and 0.8 of 3 steps are together more than 3
# What each duration of a curve must do, and the fewest and the most steps that it may take, given T and W.
_PHASES: dict[str, tuple[str, Callable[[float, float], tuple[float, float]]]] = {
    "warmup": ("be at most total_steps", lambda T, W: (0.0, T)),
    "flat": ("lie between the end of the warmup and total_steps", lambda T, W: (W, T)),
    "cooldown": ("fit between the end of the warmup and total_steps", lambda T, W: (0.0, T - W)),
    "milestones": ("come in order, after the end of the warmup", lambda T, W: (W, math.inf)),
}


def whole_steps(duration: Duration, total_steps: int, place: Place | None = None) -> float:
    """The steps of a duration: 0.28 of 25 is 7, which floats make 7.000000000000001 and so the eighth step.

    Steps that are counted from the beginning of training become those of the plan at its ``place``.
    """
    steps = duration_steps(min(duration, MOST), total_steps)  # an int may be too large for a float
    if place is not None and isinstance(duration, int):
        steps = place.planned(steps)
    return float(round(steps) if abs(steps - round(steps)) < ROUNDING else steps)


def in_steps(settings: Mapping[str, Any], place: Place, is_trial: bool) -> dict[str, Any]:
    """The settings of a curve with its durations in steps.

    Args:
        settings: Settings of a curve, a warm-up among them, checked by ``check_settings``.
        place: The place of the fit in its plan, with T.
        is_trial: Whether durations given in steps may be longer than training, and end with it.

    Raises:
        ValueError: If the phases of the curve do not follow each other within T.
    """
    total_steps = place.total
    steps = {name: float(value) if isinstance(value, float) else value for name, value in settings.items()}  # no NumPy
    phases = {name: settings[name] for name in _PHASES if name in settings}
    durations = {name: [value] if isinstance(value, int | float) else value for name, value in phases.items()}
    shorten = is_trial and any(isinstance(duration, int) and duration for duration in chain(*durations.values()))
    for name, given in phases.items():
        rule, limits = _PHASES[name]
        least, most = limits(total_steps, steps["warmup"])
        lengths = [whole_steps(d, total_steps, None if name == "cooldown" else place) for d in durations[name]]
        if shorten:
            lengths = [min(max(length, least), most, total_steps) for length in lengths]
        if any(after < before - ROUNDING for before, after in pairwise([least, *lengths, most])):
            found = f"{', '.join(f'{length:g}' for length in lengths)} of {total_steps} steps"
            remedy = "" if name == "warmup" else f", which takes {steps['warmup']:g} steps, or change {name}"
            raise ValueError(f"{name} must {rule}, got {given!r} ({found}): shorten the warmup{remedy}.")
        steps[name] = tuple(lengths) if name == "milestones" else lengths[0]
    return steps


def count_steps(module: L.LightningModule | None, schedule: str) -> int:
    """The number of optimizer steps of the fit that a module is in.

    Args:
        module: The module, if one was given.
        schedule: The name of the factory that needs the number, for the error message.

    Raises:
        UnknownTotalSteps: If the steps cannot be counted.
    """
    needs = f"{schedule} needs the number of optimizer steps"
    if module is None:
        raise UnknownTotalSteps(f"{needs}, and neither module nor total_steps was given: pass the module (self)")
    needs += f" of {type(module).__name__}"
    trainer = trainer_of(module)
    if trainer is None:
        raise UnknownTotalSteps(f"{needs}, which has no Trainer yet (call this in configure_optimizers)")
    try:
        return fit_of(trainer).total
    except UnknownTotalSteps as error:
        raise UnknownTotalSteps(f"{needs}: {error.reason}", error.otherwise) from error
