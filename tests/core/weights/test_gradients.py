"""Where gradients can be changed before a step, and where they cannot."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.by_engine import local_gradients
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.core.weights.local import LocalWeights
from tests.batches import refused
from tests.nets import NormNet, PlainNet, build, fit, loader, trainer, weights


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


class Adapts(PlainNet):
    """Adapts itself to a test set, by steps of its own optimizer."""

    automatic_optimization = False
    bad = False

    def descend(self, batch: Any) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            x, y = (part.clone() for part in batch)
            loss = F.cross_entropy(self(x), y) * (math.nan if self.bad else 1.0)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.descend(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.descend(batch)


@pytest.mark.few(4)
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(
    "trick",
    [lambda: lt.AdaptiveClip(1e-3), lambda: lt.AutoClip(), lt.SkipNonFinite, lt.TerminateOnNonFinite],
    ids=["AdaptiveClip", "AutoClip", "SkipNonFinite", "TerminateOnNonFinite"],
)
def test_steps_outside_of_a_fit_are_left_alone(trick: Any, bad: bool) -> None:
    ended = []
    for stays in (True, False):
        module = build(Adapts)
        run = fit(module, callbacks=[trick()])
        run.callbacks = [callback for callback in run.callbacks if stays or not isinstance(callback, Trick)]
        module.bad, before = bad, weights(module)
        run.test(module, loader(24), verbose=False)
        assert not torch.equal(weights(module)["layers.0.weight"], before["layers.0.weight"])
        ended.append(weights(module))
    torch.testing.assert_close(*ended, rtol=0, atol=0, equal_nan=True)


class Sparse(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0] + self.embedding(batch[1])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("trick", [lt.AdaptiveClip, lt.AutoClip])
def test_sparse_gradients_are_refused_by_name(trick: Any) -> None:
    refused(Sparse, rf"{trick.__name__} .*sparse.*embedding\.weight.*sparse=False", [trick()])
