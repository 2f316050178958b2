"""From a curve and its settings to the dictionary that Lightning wants from ``configure_optimizers``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_tricks.core.active import begin
from lightning_tricks.core.checks import check_choice, check_count, check_duration, check_range, duration_steps
from lightning_tricks.core.steps import UnknownTotalSteps, optimizer_steps
from lightning_tricks.schedules import curves
from lightning_tricks.schedules.scheduler import CurveLR

Schedule = dict[str, Any]
Duration = int | float  # optimizer steps, or a fraction of training
_ROUNDING = 1e-9  # of lengths: 0.2 and 0.8 of 3 steps are more than 3


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise for a length that is no duration, and for every other value out of range."""
    for name, value in settings.items():
        if name in ("warmup", "flat", "cooldown"):
            check_duration(name, value)
        elif name == "milestones":
            if isinstance(value, str | bytes) or not isinstance(value, Sequence):
                raise TypeError(f"milestones must be a list of ints (steps) and floats (fractions), got {value!r}.")
            for milestone in value:
                check_duration(name, milestone)
        elif name == "momentum":
            _check_momentum(value)
        elif name == "cycles":
            _check_cycles(value, settings.get("growth", 1.0))
        elif name == "shape":
            check_choice(name, value, curves.COOLDOWNS)
        elif name == "power":
            check_range(name, value, 0.0)
        elif name != "growth":
            check_range(name, value, 0.0, 1.0)


def _check_cycles(cycles: int, growth: float) -> None:
    check_count("cycles", cycles)
    check_range("growth", growth, 1.0)
    if cycles > 1000 or cycles * math.log(growth) > 700:  # exp(710) is no float
        raise ValueError(
            f"cycles must be at most 1000, and growth**cycles a number, got cycles={cycles}, growth={growth}."
        )


def _check_momentum(pair: tuple[float, float]) -> None:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(f"momentum must be two numbers, lowest and highest, for example (0.85, 0.95), got {pair!r}.")
    for value in pair:
        check_range("momentum", value, 0.0, 1.0, below=True)
    if pair[0] > pair[1]:
        raise ValueError(f"momentum must have the lowest first and the highest second, got {pair!r}: swap them.")


def check_arguments(optimizer: Optimizer, module: pl.LightningModule | None) -> None:
    """Raise unless they are what they should be."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer (module comes second), got {optimizer!r}.")
    if module is not None and not isinstance(module, pl.LightningModule):
        raise TypeError(f"module must be a LightningModule, got {type(module).__name__}.")


def build(
    curve: Callable[..., float],
    optimizer: Optimizer,
    module: pl.LightningModule | None,
    total_steps: int | None,
    momentum: tuple[float, float] | None = None,
    *,
    endless: bool = False,
    **settings: Any,
) -> Schedule:
    """A curve with its settings, in steps, and what goes around it; an endless curve needs no total."""
    check_arguments(optimizer, module)
    check_settings(settings if momentum is None else {**settings, "momentum": momentum})
    unknown = endless and total_steps is None and isinstance(settings["warmup"], int)
    if unknown:
        total_steps = max(settings["warmup"], 1)  # nothing depends on it
    total = count_steps(module) if total_steps is None else total_steps
    check_count("total_steps", total)
    plain = {name: _in_steps(name, value, total) for name, value in settings.items()}
    if total_steps is None and _is_cut_short(module):
        _shorten(plain, settings, total)
    _check_order(plain, settings, total)
    cycled = None
    if momentum is not None:
        low, high = momentum
        cycled = partial(
            curves.one_cycle_momentum, total_steps=total, warmup=plain["warmup"], low=float(low), high=float(high)
        )
    bound = partial(curve, total_steps=None if unknown else total, **plain)
    announce(module)
    return wrapped(CurveLR(optimizer, bound, momentum=cycled))


def wrapped(scheduler: CurveLR) -> Schedule:
    """The dictionary for a scheduler that steps with the optimizer."""
    return {
        "optimizer": scheduler.optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
    }


def count_steps(module: pl.LightningModule | None) -> int:
    """The optimizer steps of the fit that a module is in."""
    if module is None:
        raise UnknownTotalSteps("neither module nor total_steps was given: pass the module (self) to count them")
    trainer = trainer_of(module)
    if trainer is None:
        raise UnknownTotalSteps("the module has no Trainer yet (call this in configure_optimizers)")
    # a Trainer that fits a second time goes on counting, but this schedule starts anew; a resumed one is restored
    taken = 0 if trainer.ckpt_path else trainer.global_step
    return max(1, optimizer_steps(trainer) - taken)


def announce(module: pl.LightningModule | None) -> None:
    """Let the fit that a module is in know of a schedule."""
    if (trainer := trainer_of(module)) is not None:
        begin(trainer)


def trainer_of(module: pl.LightningModule | None) -> pl.Trainer | None:
    """The Trainer that a module is in, if it is in one."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:
        return None


def whole_steps(duration: Duration, total: int) -> float:
    """The steps of a duration: 0.28 of 25 is 7, which floats make 7.000000000000001 and so the eighth step."""
    steps = duration_steps(duration, total)
    return float(round(steps) if abs(steps - round(steps)) < _ROUNDING else steps)


def _in_steps(name: str, value: Any, total: int) -> Any:
    if name in ("warmup", "flat", "cooldown"):
        return whole_steps(value, total)
    if name == "milestones":
        return tuple(whole_steps(milestone, total) for milestone in value)
    return float(value) if isinstance(value, float) else value


def _is_cut_short(module: pl.LightningModule | None) -> bool:
    """Whether a fit is a trial of the training that the lengths in steps were chosen for."""
    trainer = trainer_of(module)
    return trainer is not None and bool(trainer.fast_dev_run or trainer.overfit_batches > 0)  # type: ignore[attr-defined]


def _shorten(steps: dict[str, Any], given: Mapping[str, Any], total: int) -> None:
    """Let the phases of a curve end where training ends, if some are given in steps."""
    lengths = [given.get(name) for name in ("warmup", "flat", "cooldown")] + [*given.get("milestones", ())]
    if not any(isinstance(length, int) and length for length in lengths):
        return
    steps["warmup"] = min(steps["warmup"], total)
    if "flat" in steps:
        steps["flat"] = min(max(steps["flat"], steps["warmup"]), total)
    if "cooldown" in steps:
        steps["cooldown"] = min(steps["cooldown"], total - steps["warmup"])
    if "milestones" in steps:
        steps["milestones"] = tuple(min(max(each, steps["warmup"]), total) for each in steps["milestones"])


def _check_order(steps: dict[str, Any], given: Mapping[str, Any], total: int) -> None:
    """Raise unless the phases of a curve lie in training, one behind the other."""
    for name in ("warmup", "flat", "cooldown"):
        if steps.get(name, 0) > total:
            raise ValueError(f"{name} must be at most total_steps={total}, got {given[name]!r}.")
    warmup = steps["warmup"]
    if steps.get("flat", warmup) < warmup - _ROUNDING:
        raise ValueError(
            f"flat must not start before warmup ends at step {warmup:g}, got flat={given['flat']!r}"
            f" (step {steps['flat']:g} of {total}): shorten the warmup or start flat later."
        )
    if warmup + steps.get("cooldown", 0) > total + _ROUNDING:
        raise ValueError(
            f"warmup and cooldown must not overlap, got {given['warmup']!r} and {given['cooldown']!r} of {total} steps:"
            " shorten one of them."
        )
    milestones = (warmup, *steps.get("milestones", ()))
    if list(milestones) != sorted(milestones):
        raise ValueError(
            f"milestones must come in order and after the warmup, got {given['milestones']!r} (steps"
            f" {', '.join(f'{step:g}' for step in milestones[1:])}) and a warmup to step {warmup:g}: sort them, or"
            " shorten the warmup."
        )
