"""Optimizers to return from ``configure_optimizers``."""

from lightning_tricks.optimizers.adamw import adamw

__all__ = ["adamw"]
