"""Data parallelism: one whole model a process, gradients averaged."""

from __future__ import annotations

from typing import final

from lightning.pytorch.strategies import DDPStrategy

from lightning_tricks.strategies.precision import FixedPrecision


@final
class DDPBF16(FixedPrecision, DDPStrategy):
    """DDP in bf16-mixed; gloo on CPU, nccl on CUDA."""

    strategy_name = "ddp_bf16"
    precision = "bf16-mixed"
