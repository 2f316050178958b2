"""What goes into ``Trainer(callbacks=[...])``."""

from lightning_tricks.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_tricks.callbacks.adaptive_clip import AdaptiveClip, adaptive_clip_
from lightning_tricks.callbacks.auto_clip import AutoClip
from lightning_tricks.callbacks.batch_size_warmup import BatchSizeWarmup
from lightning_tricks.callbacks.channels_last import ChannelsLast
from lightning_tricks.callbacks.compile import Compile
from lightning_tricks.callbacks.cutmix import CutMix, cutmix
from lightning_tricks.callbacks.data_wait import DataWait
from lightning_tricks.callbacks.distill import Distill, distillation_loss
from lightning_tricks.callbacks.ema import EMA, Averager, scale_ema_decay
from lightning_tricks.callbacks.exact_resume import ExactResume
from lightning_tricks.callbacks.fits_memory.callback import FitsMemory
from lightning_tricks.callbacks.float8 import Float8
from lightning_tricks.callbacks.gradient_stats import GradientStats
from lightning_tricks.callbacks.gradual_unfreeze import GradualUnfreeze
from lightning_tricks.callbacks.hard_examples import HardExampleFilter, ohem_loss
from lightning_tricks.callbacks.hidden_mixup import HiddenMixup
from lightning_tricks.callbacks.layer_freezing import LayerFreezing, frozen_layers
from lightning_tricks.callbacks.lean_loss import LeanLoss
from lightning_tricks.callbacks.logit_adjustment import LogitAdjustment
from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.callbacks.lr_schedule import LRSchedule
from lightning_tricks.callbacks.mixup import Mixup, mixup
from lightning_tricks.callbacks.moe_balance import MoEBalance, balance_experts_
from lightning_tricks.callbacks.neftune import NEFTune
from lightning_tricks.callbacks.post_hoc_ema import PostHocEMA, power_decay
from lightning_tricks.callbacks.preemption import Preemption
from lightning_tricks.callbacks.progressive_resizing import ProgressiveResizing, resize_images
from lightning_tricks.callbacks.qat import QAT
from lightning_tricks.callbacks.rewind_on_spike import RewindOnSpike
from lightning_tricks.callbacks.sam import SAMCallback
from lightning_tricks.callbacks.schedule_free import ScheduleFree
from lightning_tricks.callbacks.sequence_length_warmup import SequenceLengthWarmup
from lightning_tricks.callbacks.skip_non_finite import SkipNonFinite
from lightning_tricks.callbacks.step_in_backward import StepInBackward
from lightning_tricks.callbacks.swa import SWA
from lightning_tricks.callbacks.teacher import Teacher
from lightning_tricks.callbacks.terminate_on_non_finite import TerminateOnNonFinite
from lightning_tricks.callbacks.throughput import Throughput
from lightning_tricks.callbacks.token_mean import TokenMean
from lightning_tricks.callbacks.transforms.batch_transform import BatchTransform
from lightning_tricks.callbacks.transforms.colout import ColOut, colout
from lightning_tricks.callbacks.transforms.cutout import CutOut, cutout
from lightning_tricks.core.averaging.decay import ema_decay
from lightning_tricks.core.batches.growing import growing_size

__all__ = [
    "EMA",
    "QAT",
    "SWA",
    "ActivationCheckpointing",
    "AdaptiveClip",
    "AutoClip",
    "Averager",
    "BatchSizeWarmup",
    "BatchTransform",
    "ChannelsLast",
    "ColOut",
    "Compile",
    "CutMix",
    "CutOut",
    "DataWait",
    "Distill",
    "ExactResume",
    "FitsMemory",
    "Float8",
    "GradientStats",
    "GradualUnfreeze",
    "HardExampleFilter",
    "HiddenMixup",
    "LRSchedule",
    "LayerFreezing",
    "LeanLoss",
    "LoRA",
    "LogitAdjustment",
    "Mixup",
    "MoEBalance",
    "NEFTune",
    "PostHocEMA",
    "Preemption",
    "ProgressiveResizing",
    "RewindOnSpike",
    "SAMCallback",
    "ScheduleFree",
    "SequenceLengthWarmup",
    "SkipNonFinite",
    "StepInBackward",
    "Teacher",
    "TerminateOnNonFinite",
    "Throughput",
    "TokenMean",
    "adaptive_clip_",
    "balance_experts_",
    "colout",
    "cutmix",
    "cutout",
    "distillation_loss",
    "ema_decay",
    "frozen_layers",
    "growing_size",
    "mixup",
    "ohem_loss",
    "power_decay",
    "resize_images",
    "scale_ema_decay",
]
