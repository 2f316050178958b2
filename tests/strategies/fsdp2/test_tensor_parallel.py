"""Layers that are split among processes, and sharded among the others, against one process on all of their batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_tricks as lt
from tests.nets import PlainNet, assert_close, build, weights
from tests.ranks import Cases, run_cases
from tests.strategies.fsdp2.split_nets import (
    ATTENTION,
    HAND,
    SEQUENCE,
    Pretrained,
    Qwen,
    Tied,
    Words,
    alone,
    together,
)
from tests.strategies.sharded import local_bytes, whole

CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}
PLANNED = {"plan": HAND}


class SAMWords(lt.SAMMixin, Words):
    sam = lt.SAM(0.05)


class ManualWords(Words):
    """Clips by hand between two steps."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        for sign in (1, -1):
            self.manual_backward(F.cross_entropy(self(sign * x), y))
            if batch_idx % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()


class Pairs(Words):
    """Compares the samples of all processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        return lt.functional.info_nce(z, z.roll(1, 1) + batch[1][:, None])


class Experts(Words):
    """Counts how often a router chooses each of three experts."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.register_buffer("expert_bias", torch.zeros(3))
        self.register_buffer("tokens_per_expert", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tokens_per_expert += (3 * batch[0].sigmoid()).long().clamp(max=2).flatten().bincount(minlength=3)
        return super().training_step(batch, batch_idx)


def tricks(*make: Callable[[], Callback]) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [one() for one in make]}


Case = tuple[type[PlainNet], dict[str, Any], Callable[[], dict[str, Any]]]
CASES: dict[str, Case] = {  # module, of the preset, of the Trainer
    "clipped": (Words, PLANNED, lambda: CLIPPED),
    "sequence": (Words, {"plan": SEQUENCE}, dict),
    "tied": (Tied, PLANNED, lambda: CLIPPED),
    "llama": (Pretrained, {}, dict),
    "qwen": (Qwen, {}, dict),
    "attention alone": (Words, {"plan": ATTENTION}, lambda: CLIPPED),
    "offload": (Words, {**PLANNED, "offload": True}, lambda: CLIPPED),
    "other groups": (Words, {**PLANNED, "modules": ["Attention", "^head"]}, dict),
    "recomputed": (Words, {**PLANNED, "activation_checkpointing": True}, dict),
    "recomputed sequence": (Words, {"plan": SEQUENCE, "activation_checkpointing": True}, dict),
    "manual": (ManualWords, PLANNED, dict),
    "sam": (SAMWords, PLANNED, lambda: CLIPPED),
    "SAMCallback": (Words, PLANNED, tricks(lambda: lt.SAMCallback(0.05))),
    "ActivationCheckpointing": (Words, PLANNED, tricks(lt.ActivationCheckpointing)),
    "AutoClip": (Words, PLANNED, tricks(lambda: lt.AutoClip(10))),
    "Compile": (Words, PLANNED, tricks(lambda: lt.Compile("Block", backend="aot_eager"))),
    "EMA": (Words, PLANNED, tricks(lambda: lt.EMA(0.9))),
    "HardExampleFilter": (Words, PLANNED, tricks(lambda: lt.HardExampleFilter(mode="loss", across_ranks=True))),
    "MoEBalance": (Experts, PLANNED, tricks(lambda: lt.MoEBalance(0.1))),
    "RewindOnSpike": (Words, PLANNED, tricks(lt.RewindOnSpike)),
    "SWA": (Words, PLANNED, tricks(lambda: lt.SWA(0.5))),
    "SkipNonFinite": (Words, PLANNED, tricks(lt.SkipNonFinite)),
    "info_nce": (Pairs, PLANNED, dict),
}
QUICK = ("clipped", "sequence")


def ended(case: str) -> dict[str, Any]:
    kind, arguments, settings = CASES[case]
    # torch's compiler looks at the gradients of gathered weights.
    warnings.filterwarnings("ignore", r"The .grad attribute of a Tensor that is not a leaf Tensor")
    module, run = together(kind, arguments, **settings())
    states = [t for state in run.optimizers[0].state.values() for t in state.values() if t.ndim]
    return {"weights": whole(module), "bytes": [local_bytes(tensors) for tensors in (module.parameters(), states)]}


@pytest.fixture(scope="module")
def two() -> Cases:
    return run_cases(ended, QUICK)


@pytest.fixture(scope="module")
def four() -> Cases:
    return run_cases(ended, CASES, nprocs=4, timeout=900)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(case, "two") for case in QUICK] + [pytest.param(case, "four", marks=pytest.mark.slow) for case in CASES],
)
def test_the_weights_are_those_of_one_process(request: pytest.FixtureRequest, case: str, ranks: str) -> None:
    kind, _, settings = CASES[case]
    module, _ = alone(kind, **settings())
    for rank in request.getfixturevalue(ranks)[case]:
        assert_close(rank["weights"], weights(module), 1e-5)


def test_a_process_holds_its_part(two: Cases) -> None:
    module = build(Words)
    parts = (".q.", ".k.", ".v.", "o.weight", "up", "down.weight", "embedding", "head")
    split = sum(p.nbytes for name, p in module.named_parameters() if any(part in name for part in parts))
    held, trained = (sum(p.nbytes for p in module.parameters() if p.requires_grad >= flag) for flag in (False, True))
    for rank in two["clipped"]:
        assert rank["bytes"] == [held - split // 2, 2 * (trained - split // 2)]  # AdamW has two states a weight
