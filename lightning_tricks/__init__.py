"""Training tricks for a stock Lightning Trainer: add a callback, inherit a mixin, name a strategy preset."""

from lightning_tricks import functional
from lightning_tricks.advisor.batch_size import find_batch_size
from lightning_tricks.advisor.choose import suggest_strategy
from lightning_tricks.advisor.doctor import Doctor
from lightning_tricks.advisor.environment import environment_report
from lightning_tricks.advisor.hardware import Hardware
from lightning_tricks.advisor.inspect_training import InspectTraining, inspect_training
from lightning_tricks.advisor.memory.estimate import estimate_memory
from lightning_tricks.advisor.non_finite import find_non_finite
from lightning_tricks.advisor.profile import profile_tricks
from lightning_tricks.advisor.simulate.plan import suggest_plan
from lightning_tricks.advisor.simulate.transformer import TransformerShape
from lightning_tricks.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_tricks.callbacks.adaptive_clip import AdaptiveClip
from lightning_tricks.callbacks.auto_clip import AutoClip
from lightning_tricks.callbacks.batch_size_warmup import BatchSizeWarmup
from lightning_tricks.callbacks.channels_last import ChannelsLast
from lightning_tricks.callbacks.compile import Compile
from lightning_tricks.callbacks.cutmix import CutMix
from lightning_tricks.callbacks.data_wait import DataWait
from lightning_tricks.callbacks.distill import Distill
from lightning_tricks.callbacks.ema import EMA
from lightning_tricks.callbacks.exact_resume import ExactResume
from lightning_tricks.callbacks.fits_memory.callback import FitsMemory
from lightning_tricks.callbacks.float8 import Float8
from lightning_tricks.callbacks.gradient_stats import GradientStats
from lightning_tricks.callbacks.gradual_unfreeze import GradualUnfreeze
from lightning_tricks.callbacks.hard_examples import HardExampleFilter
from lightning_tricks.callbacks.hidden_mixup import HiddenMixup
from lightning_tricks.callbacks.layer_freezing import LayerFreezing
from lightning_tricks.callbacks.lean_loss import LeanLoss
from lightning_tricks.callbacks.logit_adjustment import LogitAdjustment
from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.callbacks.lr_schedule import LRSchedule
from lightning_tricks.callbacks.mixup import Mixup
from lightning_tricks.callbacks.moe_balance import MoEBalance
from lightning_tricks.callbacks.neftune import NEFTune
from lightning_tricks.callbacks.post_hoc_ema import PostHocEMA
from lightning_tricks.callbacks.preemption import Preemption
from lightning_tricks.callbacks.progressive_resizing import ProgressiveResizing
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
from lightning_tricks.callbacks.transforms.colout import ColOut
from lightning_tricks.callbacks.transforms.cutout import CutOut
from lightning_tricks.checkpoints.average import average_checkpoints
from lightning_tricks.checkpoints.consolidate import consolidate
from lightning_tricks.checkpoints.export import export_weights
from lightning_tricks.checkpoints.export_adapters import export_adapters
from lightning_tricks.checkpoints.newest import newest_checkpoint
from lightning_tricks.checkpoints.post_hoc import post_hoc_average, post_hoc_sweep
from lightning_tricks.checkpoints.soup import greedy_soup
from lightning_tricks.core.lightning.fit import optimizer_steps
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.data.balanced_sampler import balanced_sampler
from lightning_tricks.data.length_buckets import LengthBuckets
from lightning_tricks.data.packing import pack_sequences
from lightning_tricks.data.token_buckets import BatchedDataset, TokenBuckets
from lightning_tricks.data.weighted_sampler import DistributedWeightedSampler
from lightning_tricks.data.workers import find_num_workers
from lightning_tricks.evaluation.compare import compare
from lightning_tricks.evaluation.cross_validate import cross_validate
from lightning_tricks.evaluation.ensemble import Ensemble
from lightning_tricks.evaluation.label_errors import LabelErrors
from lightning_tricks.evaluation.label_report import label_report
from lightning_tricks.evaluation.soup_and_ensemble import soup_and_ensemble
from lightning_tricks.evaluation.temperature import fit_temperature
from lightning_tricks.evaluation.tta import tta
from lightning_tricks.losses.bce_targets import bce_targets
from lightning_tricks.losses.contrastive import clip_loss, info_nce
from lightning_tricks.losses.diffusion import min_snr_weight
from lightning_tricks.losses.lean_loss import lean_loss
from lightning_tricks.losses.logit_adjustment import logit_adjustment
from lightning_tricks.modules.bias_before_batchnorm import drop_bias_before_batchnorm
from lightning_tricks.modules.blur_pool import add_blur_pool
from lightning_tricks.modules.freeze import freeze
from lightning_tricks.modules.grad_cache.mixin import GradCacheMixin
from lightning_tricks.modules.init_weights import init_weights
from lightning_tricks.modules.merge_adapters import merge_adapters
from lightning_tricks.modules.quantize import quantize
from lightning_tricks.modules.sam.mixin import SAMMixin
from lightning_tricks.modules.sam.rules import SAM
from lightning_tricks.modules.sharpness import sharpness
from lightning_tricks.modules.squeeze_excite import add_squeeze_excite
from lightning_tricks.modules.stochastic_depth import add_stochastic_depth
from lightning_tricks.optimizers.adamw import adamw
from lightning_tricks.optimizers.by_name import optimizer
from lightning_tricks.optimizers.table import optimizers
from lightning_tricks.schedules import lr_scheduler
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
from lightning_tricks.schedules.lr_finder import find_lr
from lightning_tricks.schedules.param_groups import discriminative_groups, layer_decay_groups, no_weight_decay_groups
from lightning_tricks.schedules.plateau import reduce_on_plateau
from lightning_tricks.schedules.plot import plot_schedule
from lightning_tricks.schedules.scaling import effective_batch_size, scale_adam, scale_lr
from lightning_tricks.schedules.tail import swa_tail
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
    "BatchTransform",
    "BatchedDataset",
    "ChannelsLast",
    "ColOut",
    "Compile",
    "CutMix",
    "CutOut",
    "DDPPreset",
    "DataWait",
    "Distill",
    "DistributedWeightedSampler",
    "Doctor",
    "Ensemble",
    "ExactResume",
    "FSDP2Preset",
    "FitsMemory",
    "Float8",
    "GradCacheMixin",
    "GradientStats",
    "GradualUnfreeze",
    "HardExampleFilter",
    "Hardware",
    "HiddenMixup",
    "InspectTraining",
    "LRSchedule",
    "LabelErrors",
    "LayerFreezing",
    "LeanLoss",
    "LengthBuckets",
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
    "SAMMixin",
    "ScheduleFree",
    "SequenceLengthWarmup",
    "SinglePreset",
    "SkipNonFinite",
    "StepInBackward",
    "Teacher",
    "TerminateOnNonFinite",
    "Throughput",
    "TokenBuckets",
    "TokenMean",
    "TransformerShape",
    "UnknownTotalSteps",
    "ZeROPreset",
    "adamw",
    "add_blur_pool",
    "add_squeeze_excite",
    "add_stochastic_depth",
    "average_checkpoints",
    "balanced_sampler",
    "bce_targets",
    "clip_loss",
    "compare",
    "consolidate",
    "constant",
    "cosine",
    "cosine_restarts",
    "cross_validate",
    "discriminative_groups",
    "drop_bias_before_batchnorm",
    "effective_batch_size",
    "environment_report",
    "estimate_memory",
    "export_adapters",
    "export_weights",
    "find_batch_size",
    "find_lr",
    "find_non_finite",
    "find_num_workers",
    "fit_temperature",
    "flat_cos",
    "freeze",
    "functional",
    "greedy_soup",
    "info_nce",
    "init_weights",
    "inspect_training",
    "inverse_sqrt",
    "label_report",
    "layer_decay_groups",
    "lean_loss",
    "linear",
    "logit_adjustment",
    "lr_scheduler",
    "merge_adapters",
    "min_snr_weight",
    "newest_checkpoint",
    "no_weight_decay_groups",
    "one_cycle",
    "optimizer",
    "optimizer_steps",
    "optimizers",
    "pack_sequences",
    "plot_schedule",
    "polynomial",
    "post_hoc_average",
    "post_hoc_sweep",
    "preset",
    "presets",
    "profile_tricks",
    "quantize",
    "ray_trainer",
    "reduce_on_plateau",
    "scale_adam",
    "scale_lr",
    "sharpness",
    "soup_and_ensemble",
    "speed_preset",
    "step_decay",
    "suggest_plan",
    "suggest_strategy",
    "swa_tail",
    "tta",
    "wsd",
]

__version__ = "0.1.0"
