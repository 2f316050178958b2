"""What goes into ``Trainer(callbacks=[...])``."""

from lightning_tricks.callbacks.ema import EMA, scale_ema_decay
from lightning_tricks.callbacks.lr_schedule import LRSchedule
from lightning_tricks.callbacks.swa import SWA

__all__ = ["EMA", "SWA", "LRSchedule", "scale_ema_decay"]
