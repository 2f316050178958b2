"""Optimizers to return from ``configure_optimizers``."""

from lightning_tricks.optimizers.adamw import adamw
from lightning_tricks.optimizers.by_name import optimizer
from lightning_tricks.optimizers.table import optimizers

__all__ = ["adamw", "optimizer", "optimizers"]
