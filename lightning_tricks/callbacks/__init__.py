"""What goes into ``Trainer(callbacks=[...])``."""

from lightning_tricks.callbacks.ema import EMA, scale_ema_decay
from lightning_tricks.callbacks.lr_schedule import LRSchedule

__all__ = ["EMA", "LRSchedule", "scale_ema_decay"]
