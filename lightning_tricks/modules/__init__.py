"""LightningModule mixins, and what they are measured by."""

from lightning_tricks.modules.sam import SAMMixin
from lightning_tricks.modules.sam_rules import SAM

__all__ = ["SAM", "SAMMixin"]
