"""A fit with a trick equals a plain loop with a naive form of it: in each precision, accumulated, clipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

import lightning_tricks as lt
from tests.conformance.runs import REFUSED_BY, beside_the_plain_loop, fp16, refusal, run
from tests.conformance.settings import SETTINGS, in_regimes
from tests.conformance.trick import public_name
from tests.nets import NormNet, assert_close, build, fit, loader, weights
from tests.reference.averages import NaiveEMA
from tests.reference.loop import Naive, naive_fit


def overflowing() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))]}


# Settings of the Trainer, of the plain loop, and how far apart they may be.
REGIMES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], float]] = {
    "fp32": (dict, {}, 1e-6),
    "bf16": (lambda: {"precision": "bf16-mixed"}, {"autocast": torch.bfloat16}, 1e-6),
    "fp16": (fp16, {"autocast": torch.float16, "scale": 64.0}, 1e-6),
    "accumulate": (lambda: {"accumulate_grad_batches": 3}, {"accumulate": 3}, 1e-6),
    "clip": (lambda: {"gradient_clip_val": 0.1}, {"clip": 0.1}, 1e-6),
    "overflow": (overflowing, {"autocast": torch.float16, "scale": 2.0**24}, 1e-6),  # of the first steps in fp16
}


@pytest.mark.few(48)
@pytest.mark.parametrize(("regime", "name"), in_regimes(REGIMES))
def test_a_plain_loop_gives_the_same(name: str, regime: str, cell: Callable[..., None]) -> None:
    trick, (settings, loop, tolerance) = SETTINGS[name], REGIMES[regime]
    assert trick.neutral == (trick.naive is None), "a trick that does something has a naive form"
    if (found := {"overflow": "fp16"}.get(regime, regime)) in trick.refused:
        message = refusal(trick, **settings())
        assert public_name(name) in message
        assert REFUSED_BY[found] in message
        if regime == found:
            cell(name, regime, "refused", message)
        return
    batches = loader(36)  # five batches, so that the second window of three is short, and the last batch as well
    ended, expected, left_out = beside_the_plain_loop(trick, batches, loop, **settings())
    assert_close(ended, expected, tolerance)
    assert (left_out > 0) == (regime == "overflow" or trick.spoiled)
    if regime != "overflow":
        cell(name, regime)


@pytest.mark.parametrize(
    "settings",
    [{"precision": "64-true"}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"max_steps": 5}],
    ids=str,
)
def test_an_average_equals_a_naive_one(settings: dict[str, Any]) -> None:
    reference, module = NaiveEMA(0.9), build(NormNet)
    fit(module, callbacks=[lt.EMA(0.9, warmup=False), reference], **settings)
    reference.assert_equals(module.state_dict())


def test_the_loop_without_a_trick_is_a_plain_fit() -> None:
    module, reference = build(NormNet), build(NormNet)
    fit(module)
    naive_fit(reference, Naive(), list(loader()))
    assert_close(weights(module), weights(reference))
    assert any((a != b).any() for a, b in zip(weights(module).values(), run(SETTINGS["EMA"]).values(), strict=True))
