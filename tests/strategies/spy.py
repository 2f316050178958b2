"""A module that notes how it is trained, and the facts of a fit to compare."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from tests.nets import PlainNet, weights


class Spy(PlainNet):
    """Notes the dtypes of an activation, the weights and the gradients, and the arguments that DDP got."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.seen: dict[str, Any] = {}

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["activation"] = self.layers[0](batch[0]).dtype
        self.seen["parameters"] = {parameter.dtype for parameter in self.parameters()}
        return super().training_step(batch, batch_idx)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen["gradients"] = {parameter.grad.dtype for parameter in self.parameters() if parameter.grad is not None}
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            self.seen["ddp"] = {
                name: getattr(model, name)
                for name in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph", "bucket_bytes_cap")
            }


def facts(run: L.Trainer, module: Spy) -> dict[str, Any]:
    """What two fits must have in common if they were set up the same."""
    return {
        "strategy": type(run.strategy).__name__,
        "precision": run.precision,
        "plugin": type(run.precision_plugin).__name__,
        "arguments": run.strategy._ddp_kwargs if isinstance(run.strategy, DDPStrategy) else {},
        "world": run.world_size,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "device": run.strategy.root_device.type,
        "autocast": run.precision_plugin.device,
        "steps": run.global_step,
        "weights": weights(module.cpu()),
        **module.seen,
    }
