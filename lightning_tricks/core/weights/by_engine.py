"""The weights and gradients that a process holds, by the engine that trains them."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.lightning.engine import TORCH, UNSHARDED, Engine, require_engine
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.zero import ZeRO, ZeRO3


def local_weights(trainer: L.Trainer, module: L.LightningModule, trick: str) -> LocalWeights:
    """The weights of the module that this process holds.

    Raises:
        MisconfigurationException: Under an engine whose shards are not accessible.
    """
    engine = require_engine(trainer, trick, *TORCH, Engine.ZERO1, Engine.ZERO2, Engine.ZERO3)
    if engine in UNSHARDED:
        return LocalWeights(module)
    if engine is Engine.FSDP2:
        return FSDP2(module)
    zero = trainer.strategy.config["zero_optimization"]  # type: ignore[attr-defined]  # DeepSpeed's
    if (zero.get("offload_optimizer") or {}).get("device") == "nvme":
        raise MisconfigurationException(
            f"{trick} needs the fp32 weights in memory, got {type(trainer.strategy).__name__} with weights on NVMe."
            f" Offload the optimizer to the CPU, or remove {trick}."
        )
    return ZeRO3(module) if engine is Engine.ZERO3 else ZeRO(module, lambda: trainer.optimizers[0])


def local_gradients(trainer: L.Trainer, module: L.LightningModule, trick: str) -> LocalWeights:
    """The weights that this process holds, under engines where ``.grad`` is the gradient of a plain torch loop.

    Raises:
        MisconfigurationException: Under an engine that owns the gradients (DeepSpeed).
    """
    engine = require_engine(trainer, trick, *TORCH, why="where gradients and optimizers are torch's own")
    return FSDP2(module) if engine is Engine.FSDP2 else LocalWeights(module)
