"""Data parallelism: one whole model a process, gradients averaged."""

from __future__ import annotations

from typing import Any, Literal, final

from lightning.pytorch.strategies import DDPStrategy

from lightning_tricks.core.checks import check_choice
from lightning_tricks.strategies.precision import FixedPrecision, PresetPrecision

Compression = Literal["none", "bf16", "fp16", "powersgd", "local_sgd"]


@final
class DDPPreset(FixedPrecision, DDPStrategy):
    """One whole model a process, gradients averaged: the presets ``ddp_bf16``, ``ddp_fp16``, ``ddp_compressed_bf16``.

    Args:
        precision: What to train in: "bf16-mixed", "16-mixed" or "32-true".
        compression: How gradients travel.
        gradient_as_bucket_view: Keep gradients in DDP's buckets, which saves a copy of them.
        **settings: Further arguments of Lightning's ``DDPStrategy`` and of torch's ``DistributedDataParallel``.

    Example:
        >>> import lightning.pytorch as pl
        >>> pl.Trainer(strategy=DDPPreset(), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'
    """

    def __init__(
        self,
        *,
        precision: PresetPrecision = "bf16-mixed",
        compression: Compression = "none",
        gradient_as_bucket_view: bool = True,
        **settings: Any,
    ) -> None:
        check_choice("compression", compression, ("none", "bf16", "fp16", "powersgd", "local_sgd"))
        self.compression = compression
        super().__init__(precision=precision, gradient_as_bucket_view=gradient_as_bucket_view, **settings)
