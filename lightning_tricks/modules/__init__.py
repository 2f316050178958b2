"""Mixins for LightningModules."""

from lightning_tricks.modules.sam import SAM, SAMMixin

__all__ = ["SAM", "SAMMixin"]
