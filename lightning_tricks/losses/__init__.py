"""Losses: of large vocabularies, contrastive ones over all devices, and weights of diffusion losses."""

from lightning_tricks.losses.bce_targets import bce_targets
from lightning_tricks.losses.contrastive import clip_loss, info_nce
from lightning_tricks.losses.diffusion import min_snr_weight
from lightning_tricks.losses.lean_loss import lean_loss
from lightning_tricks.losses.logit_adjustment import logit_adjustment

__all__ = ["bce_targets", "clip_loss", "info_nce", "lean_loss", "logit_adjustment", "min_snr_weight"]
