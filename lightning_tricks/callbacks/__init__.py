"""What goes into ``Trainer(callbacks=[...])``."""

from lightning_tricks.callbacks.ema import EMA
from lightning_tricks.callbacks.lr_schedule import LRSchedule

__all__ = ["EMA", "LRSchedule"]
