"""Training tricks for a stock Lightning Trainer: add a callback, inherit a mixin, name a strategy preset."""

from lightning_tricks.callbacks import (
    EMA,
    SWA,
    CutMix,
    HardExampleFilter,
    HiddenMixup,
    LRSchedule,
    Mixup,
    cutmix,
    mixup,
    ohem_loss,
    scale_ema_decay,
)
from lightning_tricks.checkpoints import average_checkpoints, export_weights, greedy_soup
from lightning_tricks.modules import SAM, SAMMixin, Sharpness, sharpness
from lightning_tricks.schedules import (
    CurveLR,
    UnknownTotalSteps,
    constant,
    cosine,
    flat_cos,
    linear,
    one_cycle,
    optimizer_steps,
)
from lightning_tricks.strategies import preset, presets

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "SAM",
    "SWA",
    "CurveLR",
    "CutMix",
    "HardExampleFilter",
    "HiddenMixup",
    "LRSchedule",
    "Mixup",
    "SAMMixin",
    "Sharpness",
    "UnknownTotalSteps",
    "average_checkpoints",
    "constant",
    "cosine",
    "cutmix",
    "export_weights",
    "flat_cos",
    "greedy_soup",
    "linear",
    "mixup",
    "ohem_loss",
    "one_cycle",
    "optimizer_steps",
    "preset",
    "presets",
    "scale_ema_decay",
    "sharpness",
]
