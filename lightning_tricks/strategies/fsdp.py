"""Fully sharded data parallelism (FSDP2): weights, gradients and optimizer states in slices, one a process."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_tricks.strategies.precision import FixedPrecision, PresetPrecision


@final
class FSDP2Preset(FixedPrecision, ModelParallelStrategy):
    """FSDP2 of an ordinary LightningModule: the presets ``fsdp2_bf16`` and ``fsdp2_offload_bf16``.

    Args:
        precision: What to train in: "bf16-mixed" or "32-true".
        offload: Whether weights, gradients and optimizer states wait in host memory.
        **settings: Further arguments of Lightning's ``ModelParallelStrategy``.

    Example:
        >>> import lightning.pytorch as pl
        >>> pl.Trainer(strategy=FSDP2Preset(), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'
    """

    precisions = ("bf16-mixed", "32-true")

    def __init__(self, *, precision: PresetPrecision = "bf16-mixed", offload: bool = False, **settings: Any) -> None:
        self.offload = offload
        super().__init__(precision=precision, **settings)
