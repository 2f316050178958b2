"""Learning-rate schedules that step per optimizer step and end where training ends."""

from lightning_tricks.schedules.factories import constant, cosine, inverse_sqrt, linear, polynomial, step_decay
from lightning_tricks.schedules.phases import cosine_restarts, flat_cos, one_cycle, swa_tail, wsd
from lightning_tricks.schedules.plateau import PlateauLR, reduce_on_plateau
from lightning_tricks.schedules.scheduler import CurveLR
from lightning_tricks.schedules.steps import UnknownTotalSteps, optimizer_steps

__all__ = [
    "CurveLR",
    "PlateauLR",
    "UnknownTotalSteps",
    "constant",
    "cosine",
    "cosine_restarts",
    "flat_cos",
    "inverse_sqrt",
    "linear",
    "one_cycle",
    "optimizer_steps",
    "polynomial",
    "reduce_on_plateau",
    "step_decay",
    "swa_tail",
    "wsd",
]
