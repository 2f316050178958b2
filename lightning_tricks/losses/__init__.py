"""Losses: contrastive ones over all devices, and weights of diffusion losses."""

from lightning_tricks.losses.contrastive import clip_loss, info_nce

__all__ = ["clip_loss", "info_nce"]
