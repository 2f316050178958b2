"""LightningModule mixins, and what they are measured by."""

from lightning_tricks.modules.sam import SAMMixin
from lightning_tricks.modules.sam_rules import SAM
from lightning_tricks.modules.sharpness import Sharpness, sharpness

__all__ = ["SAM", "SAMMixin", "Sharpness", "sharpness"]
