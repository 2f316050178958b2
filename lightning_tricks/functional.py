"""The pure functions of the tricks, usable without Lightning."""

from lightning_tricks.callbacks.adaptive_clip import adaptive_clip_
from lightning_tricks.callbacks.cutmix import cutmix
from lightning_tricks.callbacks.distill import distillation_loss
from lightning_tricks.callbacks.ema import Averager, scale_ema_decay
from lightning_tricks.callbacks.hard_examples import ohem_loss
from lightning_tricks.callbacks.layer_freezing import frozen_layers
from lightning_tricks.callbacks.mixup import mixup
from lightning_tricks.callbacks.moe_balance import balance_experts_
from lightning_tricks.callbacks.post_hoc_ema import power_decay
from lightning_tricks.callbacks.progressive_resizing import resize_images
from lightning_tricks.callbacks.transforms.colout import colout
from lightning_tricks.callbacks.transforms.cutout import cutout
from lightning_tricks.core.averaging.decay import ema_decay
from lightning_tricks.core.batches.growing import growing_size
from lightning_tricks.losses.bce_targets import bce_targets
from lightning_tricks.losses.contrastive import clip_loss, info_nce
from lightning_tricks.losses.diffusion import min_snr_weight
from lightning_tricks.losses.lean_loss import lean_loss
from lightning_tricks.losses.logit_adjustment import logit_adjustment
from lightning_tricks.modules.sam.rules import asam_perturb_, sam_perturb_
from lightning_tricks.modules.sam.step import sam_step

__all__ = [
    "Averager",
    "adaptive_clip_",
    "asam_perturb_",
    "balance_experts_",
    "bce_targets",
    "clip_loss",
    "colout",
    "cutmix",
    "cutout",
    "distillation_loss",
    "ema_decay",
    "frozen_layers",
    "growing_size",
    "info_nce",
    "lean_loss",
    "logit_adjustment",
    "min_snr_weight",
    "mixup",
    "ohem_loss",
    "power_decay",
    "resize_images",
    "sam_perturb_",
    "sam_step",
    "scale_ema_decay",
]
