"""Training tricks for a stock Lightning Trainer: add a callback, inherit a mixin, name a strategy preset."""

from lightning_tricks import functional
from lightning_tricks.advisor.batch_size import find_batch_size
from lightning_tricks.advisor.choose import Hardware, suggest_strategy
from lightning_tricks.advisor.doctor import Doctor
from lightning_tricks.advisor.environment import environment_report
from lightning_tricks.advisor.memory.estimate import estimate_memory
from lightning_tricks.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_tricks.callbacks.adaptive_clip import AdaptiveClip
from lightning_tricks.callbacks.auto_clip import AutoClip
from lightning_tricks.callbacks.batch_size_warmup import BatchSizeWarmup
from lightning_tricks.callbacks.channels_last import ChannelsLast
from lightning_tricks.callbacks.compile import Compile
from lightning_tricks.callbacks.cutmix import CutMix
from lightning_tricks.callbacks.ema import EMA
from lightning_tricks.callbacks.gradual_unfreeze import GradualUnfreeze
from lightning_tricks.callbacks.hard_examples import HardExampleFilter
from lightning_tricks.callbacks.hidden_mixup import HiddenMixup
from lightning_tricks.callbacks.lean_loss import LeanLoss
from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.callbacks.lr_schedule import LRSchedule
from lightning_tricks.callbacks.mixup import Mixup
from lightning_tricks.callbacks.moe_balance import MoEBalance
from lightning_tricks.callbacks.preemption import Preemption
from lightning_tricks.callbacks.qat import QAT
from lightning_tricks.callbacks.rewind_on_spike import RewindOnSpike
from lightning_tricks.callbacks.sam import SAMCallback
from lightning_tricks.callbacks.schedule_free import ScheduleFree
from lightning_tricks.callbacks.skip_non_finite import SkipNonFinite
from lightning_tricks.callbacks.step_in_backward import StepInBackward
from lightning_tricks.callbacks.swa import SWA
from lightning_tricks.callbacks.terminate_on_non_finite import TerminateOnNonFinite
from lightning_tricks.checkpoints.average import average_checkpoints
from lightning_tricks.checkpoints.consolidate import consolidate
from lightning_tricks.checkpoints.export import export_weights
from lightning_tricks.checkpoints.export_adapters import export_adapters
from lightning_tricks.checkpoints.newest import newest_checkpoint
from lightning_tricks.checkpoints.soup import greedy_soup
from lightning_tricks.core.lightning.steps import UnknownTotalSteps, optimizer_steps
from lightning_tricks.losses.contrastive import clip_loss, info_nce
from lightning_tricks.losses.diffusion import min_snr_weight
from lightning_tricks.losses.lean_loss import lean_loss
from lightning_tricks.modules.bias_before_batchnorm import drop_bias_before_batchnorm
from lightning_tricks.modules.freeze import freeze
from lightning_tricks.modules.grad_cache.mixin import GradCacheMixin
from lightning_tricks.modules.merge_adapters import merge_adapters
from lightning_tricks.modules.quantize import quantize
from lightning_tricks.modules.sam.mixin import SAMMixin
from lightning_tricks.modules.sam.rules import SAM
from lightning_tricks.modules.sharpness import sharpness
from lightning_tricks.modules.stochastic_depth import add_stochastic_depth
from lightning_tricks.optimizers.adamw import adamw
from lightning_tricks.optimizers.by_name import optimizer
from lightning_tricks.optimizers.table import optimizers
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
    swa_tail,
    wsd,
)
from lightning_tricks.schedules.lr_finder import find_lr
from lightning_tricks.schedules.param_groups import discriminative_groups, layer_decay_groups, no_weight_decay_groups
from lightning_tricks.schedules.plateau import reduce_on_plateau
from lightning_tricks.schedules.plot import plot_schedule
from lightning_tricks.schedules.scaling import effective_batch_size, scale_adam, scale_lr
from lightning_tricks.strategies.ddp.preset import DDPPreset
from lightning_tricks.strategies.fsdp2.preset import FSDP2Preset
from lightning_tricks.strategies.presets import preset, presets
from lightning_tricks.strategies.ray import ray_trainer
from lightning_tricks.strategies.single import SinglePreset
from lightning_tricks.strategies.speed import speed_preset
from lightning_tricks.strategies.zero.preset import ZeROPreset

__all__ = [
    "EMA",
    "QAT",
    "SAM",
    "SWA",
    "ActivationCheckpointing",
    "AdaptiveClip",
    "AutoClip",
    "BatchSizeWarmup",
    "ChannelsLast",
    "Compile",
    "CutMix",
    "DDPPreset",
    "Doctor",
    "FSDP2Preset",
    "GradCacheMixin",
    "GradualUnfreeze",
    "HardExampleFilter",
    "Hardware",
    "HiddenMixup",
    "LRSchedule",
    "LeanLoss",
    "LoRA",
    "Mixup",
    "MoEBalance",
    "Preemption",
    "RewindOnSpike",
    "SAMCallback",
    "SAMMixin",
    "ScheduleFree",
    "SinglePreset",
    "SkipNonFinite",
    "StepInBackward",
    "TerminateOnNonFinite",
    "UnknownTotalSteps",
    "ZeROPreset",
    "adamw",
    "add_stochastic_depth",
    "average_checkpoints",
    "clip_loss",
    "consolidate",
    "constant",
    "cosine",
    "cosine_restarts",
    "discriminative_groups",
    "drop_bias_before_batchnorm",
    "effective_batch_size",
    "environment_report",
    "estimate_memory",
    "export_adapters",
    "export_weights",
    "find_batch_size",
    "find_lr",
    "flat_cos",
    "freeze",
    "functional",
    "greedy_soup",
    "info_nce",
    "inverse_sqrt",
    "layer_decay_groups",
    "lean_loss",
    "linear",
    "merge_adapters",
    "min_snr_weight",
    "newest_checkpoint",
    "no_weight_decay_groups",
    "one_cycle",
    "optimizer",
    "optimizer_steps",
    "optimizers",
    "plot_schedule",
    "polynomial",
    "preset",
    "presets",
    "quantize",
    "ray_trainer",
    "reduce_on_plateau",
    "scale_adam",
    "scale_lr",
    "sharpness",
    "speed_preset",
    "step_decay",
    "suggest_strategy",
    "swa_tail",
    "wsd",
]

__version__ = "0.1.0"
