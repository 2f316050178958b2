"""LightningModule mixins, and what they are measured by; changes of a network before training."""

from lightning_tricks.modules.bias_before_batchnorm import drop_bias_before_batchnorm
from lightning_tricks.modules.blur_pool import add_blur_pool
from lightning_tricks.modules.freeze import freeze
from lightning_tricks.modules.grad_cache.mixin import GradCacheMixin
from lightning_tricks.modules.init_weights import init_weights
from lightning_tricks.modules.merge_adapters import merge_adapters
from lightning_tricks.modules.quantize import quantize
from lightning_tricks.modules.sam.mixin import SAMMixin
from lightning_tricks.modules.sam.rules import SAM, asam_perturb_, sam_perturb_
from lightning_tricks.modules.sam.step import sam_step
from lightning_tricks.modules.sharpness import Sharpness, sharpness
from lightning_tricks.modules.squeeze_excite import add_squeeze_excite
from lightning_tricks.modules.stochastic_depth import add_stochastic_depth

__all__ = [
    "SAM",
    "GradCacheMixin",
    "SAMMixin",
    "Sharpness",
    "add_blur_pool",
    "add_squeeze_excite",
    "add_stochastic_depth",
    "asam_perturb_",
    "drop_bias_before_batchnorm",
    "freeze",
    "init_weights",
    "merge_adapters",
    "quantize",
    "sam_perturb_",
    "sam_step",
    "sharpness",
]
