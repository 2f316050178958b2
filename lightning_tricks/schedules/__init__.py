"""Learning-rate schedules that step per optimizer step and end where training ends, and what goes with them."""

from lightning_tricks.core.lightning.fit import optimizer_steps
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.schedules.factories import (
    constant,
    cosine,
    cosine_restarts,
    flat_cos,
    inverse_sqrt,
    linear,
    one_cycle,
    polynomial,
    step_decay,
    wsd,
)
from lightning_tricks.schedules.lr_finder import LRFinderResult, find_lr
from lightning_tricks.schedules.param_groups import discriminative_groups, layer_decay_groups, no_weight_decay_groups
from lightning_tricks.schedules.plateau import PlateauLR, reduce_on_plateau
from lightning_tricks.schedules.plot import plot_schedule
from lightning_tricks.schedules.scaling import effective_batch_size, scale_adam, scale_lr
from lightning_tricks.schedules.scheduler import CurveLR
from lightning_tricks.schedules.tail import swa_tail

__all__ = [
    "CurveLR",
    "LRFinderResult",
    "PlateauLR",
    "UnknownTotalSteps",
    "constant",
    "cosine",
    "cosine_restarts",
    "discriminative_groups",
    "effective_batch_size",
    "find_lr",
    "flat_cos",
    "inverse_sqrt",
    "layer_decay_groups",
    "linear",
    "no_weight_decay_groups",
    "one_cycle",
    "optimizer_steps",
    "plot_schedule",
    "polynomial",
    "reduce_on_plateau",
    "scale_adam",
    "scale_lr",
    "step_decay",
    "swa_tail",
    "wsd",
]
