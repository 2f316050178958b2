"""Losses that a stock network takes in place of its own."""

from lightning_tricks.losses.lean_loss import lean_loss

__all__ = ["lean_loss"]
