"""The engine that trains: who holds weights and gradients, and who makes the optimizer steps."""

from __future__ import annotations

from enum import Enum

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


class Engine(Enum):
    """The engine of a strategy; the values are its names in error messages."""

    SINGLE = "the single-device strategy"
    DDP = "DDP"
    FSDP2 = "ModelParallelStrategy (FSDP2)"
    ZERO0 = "DeepSpeed without ZeRO"
    ZERO1 = "DeepSpeed ZeRO-1"
    ZERO2 = "DeepSpeed ZeRO-2"
    ZERO3 = "DeepSpeed ZeRO-3"
    OTHER = "another strategy"

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed holds the gradients and makes the optimizer steps."""
        return self in _ZERO


_ZERO = (Engine.ZERO0, Engine.ZERO1, Engine.ZERO2, Engine.ZERO3)
UNSHARDED = (Engine.SINGLE, Engine.DDP)  # Every process holds the full weights.
TORCH = (*UNSHARDED, Engine.FSDP2)  # Weights, gradients and optimizers are torch's own.


def engine_of(trainer: L.Trainer) -> Engine:
    """The engine of a Trainer, by its strategy."""
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):  # a subclass of DDPStrategy, so tested first
        config = getattr(strategy, "config", None) or {}  # not every subclass calls Lightning's constructor
        return _ZERO[config.get("zero_optimization", {}).get("stage", 0)]
    if isinstance(strategy, ModelParallelStrategy):
        return Engine.FSDP2
    if isinstance(strategy, DDPStrategy):
        return Engine.DDP
    return Engine.SINGLE if isinstance(strategy, SingleDeviceStrategy) else Engine.OTHER


def require_engine(trainer: L.Trainer, trick: str, *engines: Engine, why: str = "") -> Engine:
    """The engine of a Trainer, if a trick works under it.

    Args:
        trainer: The Trainer.
        trick: The name of the trick, for the error message.
        *engines: The engines that the trick works under.
        why: The property that these engines share, for the error message.

    Raises:
        MisconfigurationException: For another engine.
    """
    engine = engine_of(trainer)
    if engine not in engines:
        *names, last = [allowed.value for allowed in engines]
        found = type(trainer.strategy).__name__
        if engine is not Engine.OTHER and found not in engine.value:
            found += f" ({engine.value})"
        raise MisconfigurationException(
            f"{trick} works under {', '.join(names)} and {last}{why and f', {why}'}, got {found}. Use such a strategy,"
            f" or remove {trick}."
        )
    return engine
