"""What goes into ``Trainer(callbacks=[...])``."""

from lightning_tricks.callbacks.adaptive_clip import AdaptiveClip, adaptive_clip_
from lightning_tricks.callbacks.auto_clip import AutoClip
from lightning_tricks.callbacks.batch_size_warmup import BatchSizeWarmup
from lightning_tricks.callbacks.cutmix import CutMix, cutmix
from lightning_tricks.callbacks.ema import EMA, scale_ema_decay
from lightning_tricks.callbacks.freeze import freeze
from lightning_tricks.callbacks.gradual_unfreeze import GradualUnfreeze
from lightning_tricks.callbacks.hard_examples import HardExampleFilter, ohem_loss
from lightning_tricks.callbacks.hidden_mixup import HiddenMixup
from lightning_tricks.callbacks.lr_schedule import LRSchedule
from lightning_tricks.callbacks.mixup import Mixup, mixup
from lightning_tricks.callbacks.swa import SWA

__all__ = [
    "EMA",
    "SWA",
    "AdaptiveClip",
    "AutoClip",
    "BatchSizeWarmup",
    "CutMix",
    "GradualUnfreeze",
    "HardExampleFilter",
    "HiddenMixup",
    "LRSchedule",
    "Mixup",
    "adaptive_clip_",
    "cutmix",
    "freeze",
    "mixup",
    "ohem_loss",
    "scale_ema_decay",
]
