"""What goes into ``Trainer(callbacks=[...])``."""

from lightning_tricks.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_tricks.callbacks.batch_size_warmup import BatchSizeWarmup
from lightning_tricks.callbacks.channels_last import ChannelsLast
from lightning_tricks.callbacks.compile import Compile
from lightning_tricks.callbacks.cutmix import CutMix, cutmix
from lightning_tricks.callbacks.ema import EMA, scale_ema_decay
from lightning_tricks.callbacks.hard_examples import HardExampleFilter, ohem_loss
from lightning_tricks.callbacks.hidden_mixup import HiddenMixup
from lightning_tricks.callbacks.lr_schedule import LRSchedule
from lightning_tricks.callbacks.mixup import Mixup, mixup
from lightning_tricks.callbacks.speed import speed_preset
from lightning_tricks.callbacks.swa import SWA

__all__ = [
    "EMA",
    "SWA",
    "ActivationCheckpointing",
    "BatchSizeWarmup",
    "ChannelsLast",
    "Compile",
    "CutMix",
    "HardExampleFilter",
    "HiddenMixup",
    "LRSchedule",
    "Mixup",
    "cutmix",
    "mixup",
    "ohem_loss",
    "scale_ema_decay",
    "speed_preset",
]
