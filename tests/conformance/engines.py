"""ZeRO-3 on CPU: Lightning refuses DeepSpeed there by three checks of the device, which a subclass can pass by."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeedStrategy for gloo processes."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # type: ignore[arg-type]  # leaves out the check for CUDA

    def setup_distributed(self) -> None:  # leaves out the check of the device index
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:  # Lightning hands root_device.index to DeepSpeed as the device's rank
        return torch.device("cpu", self.local_rank)


def cpu_deepspeed(stage: int = 3, *, persistent: bool = False, **settings: Any) -> CPUDeepSpeedStrategy:
    """ZeRO that compiles nothing and partitions even tiny weights, unless those are to be kept whole as well."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else a minute of compilation at init
    strategy = CPUDeepSpeedStrategy(stage=stage, **settings)
    assert strategy.config is not None
    strategy.config["zero_force_ds_cpu_optimizer"] = False
    if not persistent:
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy
