"""Where gradients can be changed before a step, and where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from lightning_tricks.core.weights.by_engine import local_gradients
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.core.weights.local import LocalWeights
from tests.nets import NormNet, PlainNet, build, fit, trainer


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("auto", LocalWeights), ("ddp", LocalWeights), ("single_bf16", LocalWeights), (ModelParallelStrategy(), FSDP2)],
)
def test_gradients_are_found_under(strategy: Any, kind: type) -> None:
    assert type(local_gradients(trainer(strategy=strategy), PlainNet(), "AutoClip")) is kind


class Held:
    """A Trainer that needs no GPU to have the strategy."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, FSDPStrategy])
def test_strategies_that_own_the_gradients_are_refused_by_name(kind: type) -> None:
    with pytest.raises(
        MisconfigurationException, match=rf"AutoClip works .* got {kind.__name__}[. ].* remove AutoClip"
    ):
        local_gradients(Held(kind()), PlainNet(), "AutoClip")


class Fused(NormNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.parametrize("trick", [lt.AdaptiveClip(), lt.AutoClip()], ids=["AdaptiveClip", "AutoClip"])
def test_an_optimizer_that_unscales_by_itself_is_refused(trick: Any) -> None:
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]
    with pytest.raises(MisconfigurationException, match=r"unscaled gradients, got AdamW\(fused=True\) under"):
        fit(build(Fused), callbacks=[trick], plugins=plugins)
    fit(build(Fused), callbacks=[trick], precision="bf16-mixed")
