"""Training tricks for a stock Lightning Trainer: add a callback, inherit a mixin, name a strategy preset."""

from lightning_tricks.callbacks import EMA, LRSchedule, scale_ema_decay
from lightning_tricks.modules import SAM, SAMMixin
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
    "CurveLR",
    "LRSchedule",
    "SAMMixin",
    "UnknownTotalSteps",
    "constant",
    "cosine",
    "flat_cos",
    "linear",
    "one_cycle",
    "optimizer_steps",
    "preset",
    "presets",
    "scale_ema_decay",
]
