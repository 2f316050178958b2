"""Losses: contrastive ones over all devices, and weights of diffusion losses."""

from lightning_tricks.losses.contrastive import clip_loss, info_nce
from lightning_tricks.losses.diffusion import min_snr_weight

__all__ = ["clip_loss", "info_nce", "min_snr_weight"]
