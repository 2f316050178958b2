"""MoEBalance: biases follow the loads of all ranks and accumulated batches, and experts come into balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.functional import balance_experts_
from tests.nets import TWO, Net, PlainNet, assert_close, build, fit, loader, rank_loader, trained
from tests.ranks import run_ranks
from tests.reference.loop import Naive


class Experts(nn.Module):
    """The best one of some linear experts for each sample; all of them are computed, so that DDP misses none."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.weights = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("tokens_per_expert", torch.zeros(experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).float().sigmoid()
        chosen = (scores + self.expert_bias).argmax(1)
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert += chosen.bincount(minlength=scores.shape[1])
        one_hot = F.one_hot(chosen, scores.shape[1]) * scores
        return torch.einsum("be,edf,bd->bf", one_hot.to(x.dtype), self.weights.to(x.dtype), x)


def with_experts(base: type[Net], module: Any) -> None:
    """Put experts before the last layer; the body of an ``__init__``."""
    base.__init__(module)
    module.layers.insert(len(module.layers) - 1, Experts(module.layers[-1].in_features))


class Mixture(PlainNet):
    def __init__(self) -> None:
        with_experts(PlainNet, self)


class NaiveBalance(Naive):
    """Counts by a loop over experts, since the last step that was made."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        for layer in module.layers:
            if isinstance(layer, Experts):
                loads = layer.tokens_per_expert.tolist()
                mean = sum(loads) / len(loads)
                for expert, load in enumerate(loads):
                    layer.expert_bias[expert] += self.rate if load < mean else -self.rate if load > mean else 0
                layer.tokens_per_expert = torch.zeros(len(loads))


def test_large_counts_are_compared_exactly() -> None:
    bias = torch.zeros(3)
    balance_experts_(bias, torch.tensor([10**12, 10**12 + 1, 10**12 - 1]), 1.0)
    assert bias.tolist() == [0, -1, 1]


class Skewed(Mixture):
    """The gate begins with a preference for one expert, and the loads of each step are kept."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.layers[2].gate.bias[1] = 0.8

    def on_before_zero_grad(self, optimizer: Any) -> None:
        load = self.layers[2].tokens_per_expert
        SEEN.append(float(load.max() / load.mean()))


SEEN: list[float] = []


def imbalance(callbacks: list[Callback]) -> float:
    """The largest load by the mean one, in the last of twenty epochs."""
    SEEN.clear()
    fit(build(Skewed), train=loader(320, 32), max_epochs=20, callbacks=callbacks)
    return sum(SEEN[-10:]) / 10


def test_experts_come_into_balance() -> None:
    assert imbalance([lt.MoEBalance(0.02)]) < 1.8 < 2.4 < imbalance([])


class Odd(PlainNet):
    def __init__(self, bias: Tensor, load: Tensor) -> None:
        super().__init__()
        self.layers[0].register_buffer("expert_bias", bias)
        self.layers[0].register_buffer("tokens_per_expert", load)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (PlainNet, r"MoEBalance\(0.001\) found no router in PlainNet"),
        (lambda: Odd(torch.zeros(4).bfloat16(), torch.zeros(4)), r"layers.0.expert_bias .* got torch.bfloat16 \(4,\)"),
        (lambda: Odd(torch.zeros(4), torch.zeros(4).half()), "neither in 16 bits"),
        (lambda: Odd(torch.zeros(4), torch.zeros(5)), r"one entry per expert, .*\(4,\) and torch.float32 \(5,\)"),
        (lambda: Odd(torch.zeros(1, 4), torch.zeros(1, 4)), "one entry per expert"),
        (lambda: Odd(torch.zeros(4).long(), torch.zeros(4)), "the first in fp32"),
    ],
)
def test_what_is_no_router_is_refused(module: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(module), callbacks=[lt.MoEBalance()])


def test_a_bad_rate_of_the_function_is_named() -> None:
    with pytest.raises(TypeError, match=r"rate must be a number in \[0.0, inf\), got '1'"):
        balance_experts_(torch.zeros(2), torch.ones(2), "1")  # type: ignore[arg-type]


def test_biases_that_no_checkpoint_has_are_refused() -> None:
    module = build(Mixture)
    module.layers[-2].register_buffer("expert_bias", torch.zeros(4), persistent=False)
    with pytest.raises(MisconfigurationException, match=r"moves layers\.\d\.expert_bias, which no checkpoint"):
        fit(module, callbacks=[lt.MoEBalance()])


def on_ranks() -> dict[str, Tensor]:
    settings = {"train": rank_loader(), "accumulate_grad_batches": 3, **TWO}
    return trained(Mixture, lt.MoEBalance(0.05), strategy="ddp", **settings)


def test_two_ranks_that_accumulate_equal_one_process() -> None:
    alone = trained(Mixture, lt.MoEBalance(0.05), train=loader(48), accumulate_grad_batches=6)
    for found in run_ranks(on_ranks):
        assert_close(found, alone, 1e-5)
