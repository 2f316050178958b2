"""LightningModule mixins, and what they are measured by; changes of a network before training."""

from lightning_tricks.modules.bias_before_batchnorm import drop_bias_before_batchnorm
from lightning_tricks.modules.sam import SAMMixin
from lightning_tricks.modules.sam_rules import SAM
from lightning_tricks.modules.sharpness import Sharpness, sharpness
from lightning_tricks.modules.stochastic_depth import add_stochastic_depth

__all__ = ["SAM", "SAMMixin", "Sharpness", "add_stochastic_depth", "drop_bias_before_batchnorm", "sharpness"]
