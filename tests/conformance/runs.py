"""Fits with a trick, and the networks that the regimes need."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import fully_shard

from tests.conformance.trick import Trick
from tests.nets import Net, NormNet, PlainNet, build, fit, weights


def run(trick: Trick, state: str = "on", base: type[Net] = NormNet, **settings: Any) -> dict[str, torch.Tensor]:
    """The end weights of a fit with the trick."""
    module = build(trick.module(base, state))
    callbacks = [*trick.make_callbacks(state), *settings.pop("callbacks", [])]
    fit(module, callbacks=callbacks, **settings)
    return weights(module)


def fp16() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]}


class Compiled(PlainNet):
    """The network runs compiled."""

    def setup(self, stage: str) -> None:
        self.run = torch.compile(self.layers, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class ShardedNet(PlainNet):
    """FSDP2 as its users write it."""

    def configure_model(self) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Gather(Callback):
    """The whole weights at the end, in fp32, put together from their shards."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            pl_module.layers.reshard()  # validation leaves the root unsharded
            named = dict(pl_module.named_parameters())
            self.weights = {name: weight.full_tensor().detach() for name, weight in named.items()}
        else:
            from deepspeed.utils import safe_get_full_fp32_param

            named = dict(pl_module.named_parameters())
            self.weights = {name: safe_get_full_fp32_param(weight) for name, weight in named.items()}


class Steps(Callback):
    """Counts the optimizer steps that were made."""

    made = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.made += 1


def refusal(trick: Trick, base: type[Net] = NormNet, **settings: Any) -> str:
    """The message of the error that the fit must raise before its first optimizer step."""
    steps = Steps()
    try:
        run(trick, base=base, callbacks=[steps], **settings)
    except MisconfigurationException as error:
        assert steps.made == 0, "refused too late"
        return str(error)
    raise AssertionError("it was not refused")
