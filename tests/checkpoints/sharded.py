"""Sharded checkpoints of averaged weights, saved by stock Lightning strategies on two ranks."""

from __future__ import annotations

import torch
from torch import Tensor

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.nets import PlainNet, build, rank_loader, trainer


class Tied(PlainNet):
    """With a frozen weight, tied weights and buffers."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers[0].weight.requires_grad_(False)
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.register_buffer("scale", torch.tensor([0.1, 0.2]))
        self.again = self.layers[2]


class Sharded(Tied):
    """And with extra state, which DeepSpeed's own conversion does not know."""

    def get_extra_state(self) -> dict[str, str]:
        return {"note": "extra"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        assert state == {"note": "extra"}

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.layers[2], mesh=self.device_mesh["data_parallel"])


def save_fsdp2(folder: str) -> dict[str, Tensor]:
    """Fit and save; the weights as each rank can gather them."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor import DTensor

    module = build(Sharded)
    run = trainer(
        strategy=ModelParallelStrategy(2, 1),
        devices=2,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[lt.EMA(decay=0.5)],
    )
    run.fit(module, rank_loader())
    run.save_checkpoint(folder)
    state = module.state_dict()
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}


def save_zero3(folder: str) -> dict[str, Tensor]:
    import deepspeed

    module = build(Tied)
    run = trainer(
        strategy=cpu_deepspeed(), devices=2, max_epochs=1, use_distributed_sampler=False, callbacks=[lt.EMA(decay=0.5)]
    )
    run.fit(module, rank_loader())
    run.save_checkpoint(folder)
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: value.detach().clone() for name, value in module.state_dict().items()}
