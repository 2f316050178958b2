"""Learning-rate schedules that step per optimizer step and end where training ends."""

from lightning_tricks.schedules.factories import constant, cosine, flat_cos, linear, one_cycle
from lightning_tricks.schedules.scheduler import CurveLR
from lightning_tricks.schedules.steps import UnknownTotalSteps, optimizer_steps

__all__ = [
    "CurveLR",
    "UnknownTotalSteps",
    "constant",
    "cosine",
    "flat_cos",
    "linear",
    "one_cycle",
    "optimizer_steps",
]
