"""DeepSpeed's own Muon under ZeRO presets on two ranks: equal to one process, and to timm's with Jordan's steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import timm.optim.muon
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from tests.nets import PlainNet, SaveAt, assert_close, assert_equal, build, fit, loader, rank_loader, weights
from tests.ranks import Cases, run_cases

LR, DECAY = 0.02, 0.1
pytestmark = pytest.mark.slow


class Hidden(PlainNet):
    """Three hidden matrices, of which the border between two ranks cuts the second."""

    def __init__(self, timms: bool = False) -> None:
        super().__init__()
        sizes = [(8, 16), (16, 16), (16, 12), (12, 2)]
        self.layers = nn.Sequential(*(part for size in sizes for part in (nn.Linear(*size), nn.Tanh())))
        self.timms = timms

    def configure_optimizers(self) -> Any:
        if self.timms:
            scale: dict[str, Any] = {"adamw_lr": LR, "adjust_lr_fn": "original", "ns_coefficients": "original"}
            return lt.optimizer("muon", self, LR, weight_decay=DECAY, no_decay=False, **scale)
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        hidden = {layer.weight for layer in self.layers[:6:2]}
        for weight in self.parameters():
            weight.use_muon = weight in hidden  # type: ignore[attr-defined]
        own, others = ([w for w in self.parameters() if (w in hidden) is wanted] for wanted in (True, False))
        common = {"lr": LR, "weight_decay": DECAY}
        muon = {"params": own, "use_muon": True, "momentum": 0.95, **common}
        return MuonWithAuxAdam(
            [muon, {"params": others, "use_muon": False, "betas": (0.9, 0.95), "eps": 1e-8, **common}]
        )


@contextmanager
def orthogonalized_in_fp32() -> Iterator[None]:
    """In 16 bits, a sum in another order changes a step by up to a tenth."""
    exact = partial(timm.optim.muon.zeropower_via_newtonschulz, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr("timm.optim.muon.zeropower_via_newtonschulz", exact)
        name = "deepspeed.runtime.zero.muon.original_muon.ns_compute_dtype"
        patch.setattr(name, lambda method="gram": torch.float32)
        yield


def trained(module: Hidden, *callbacks: L.Callback, **settings: Any) -> None:
    fit(module, callbacks=[*callbacks], **{"max_epochs": 4, "accumulate_grad_batches": 2, **settings})


class Masters(L.Callback):
    """The fp32 weights at the end, and the step."""

    def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.trainer = trainer

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        self.end = {name: safe_get_full_fp32_param(weight).clone() for name, weight in pl_module.named_parameters()}


@orthogonalized_in_fp32()
def on_ranks(case: tuple[int, str], folder: Path) -> Any:
    stage, what = case
    ema, masters, path = lt.EMA(0.9, at_end="raw"), Masters(), folder / f"{stage}.ckpt"
    preset = {"devices": 2, "use_distributed_sampler": False, **lt.preset(f"zero{stage}_bf16", precision="32-true")}

    def run(*callbacks: L.Callback, **settings: Any) -> None:
        trained(build(Hidden), ema, masters, *callbacks, train=rank_loader(), **preset, **settings)

    if what == "clipped":
        with pytest.raises(MisconfigurationException) as raised:
            run(gradient_clip_val=1.0)
        return str(raised.value), masters.trainer.global_step
    if what == "resumed":
        run(ckpt_path=path)
    else:
        run(SaveAt(path, epoch=1))
    return masters.end, ema.averaged_state_dict()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    cases = [(stage, what) for stage in (1, 2) for what in ("whole", "resumed")]
    return run_cases(on_ranks, [*cases, (1, "clipped")], tmp_path_factory.mktemp("muon"))


@orthogonalized_in_fp32()
def alone(timms: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What one process has that gets the batches of both ranks."""
    module, ema = build(Hidden, timms=timms), lt.EMA(0.9, at_end="raw")
    trained(module, ema, train=loader(48, 16))
    return weights(module), ema.averaged_state_dict()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("timms", "tolerance"), [(False, 1e-5), (True, 1e-4)])
def test_two_ranks_equal_one_process(stage: int, timms: bool, tolerance: float, two_ranks: Cases) -> None:
    expected = alone(timms)
    for found in two_ranks[stage, "whole"]:
        for mine, one in zip(found, expected, strict=True):
            assert_close(mine, one, tolerance)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_resumed_fit_is_exact(stage: int, two_ranks: Cases) -> None:
    for resumed, whole in zip(two_ranks[stage, "resumed"], two_ranks[stage, "whole"], strict=True):
        for again, one in zip(resumed, whole, strict=True):
            assert_equal(again, one)


def test_clipping_is_refused_before_the_first_step(two_ranks: Cases) -> None:
    for message, step in two_ranks[1, "clipped"]:
        assert "strategy='zero1_bf16' cannot clip the gradients of MuonWithAuxAdam" in message
        assert step == 0
