"""A trick that is on does something, unless it is to be neutral; at its no-op limit training is bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.runs import REFUSED_BY, fp16, refusal, run
from tests.conformance.settings import SETTINGS, in_regimes
from tests.conformance.trick import Enrolment
from tests.nets import Net, NormNet, assert_close, assert_equal

REGIMES: dict[str, Callable[[], dict[str, Any]]] = {
    "fp32": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "fp64": lambda: {"precision": "64-true"},
    "fp16": fp16,
    "accumulate": lambda: {"accumulate_grad_batches": 4},
    "clip-norm": lambda: {"gradient_clip_val": 0.1},
    "clip-value": lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "single_bf16": lambda: {"strategy": "single_bf16", "accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
}


@cache
def without(bare: Enrolment, base: type[Net], regime: str) -> dict[str, Tensor]:
    """The end weights of a fit without a trick; one fit for all tricks that need the same network."""
    return run(bare, base=base, **REGIMES[regime]())


def plain(name: str, base: type[Net], regime: str = "fp32") -> dict[str, Tensor]:
    return without(SETTINGS[name].bare(), base, regime)


@pytest.mark.few(16)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_trick_does_something_unless_it_is_to_be_neutral(name: str) -> None:
    regime = "accumulate" if SETTINGS[name].windows else "fp32"
    tricked, ended = run(SETTINGS[name], **REGIMES[regime]()), plain(name, NormNet, regime)
    if SETTINGS[name].convolutions:
        assert_close(tricked, ended)  # in another memory format sums have another order
    else:
        same = tricked.keys() == ended.keys() and all(torch.equal(tricked[key], ended[key]) for key in ended)
        assert SETTINGS[name].neutral == same


@pytest.mark.few(48)
@pytest.mark.parametrize(
    ("regime", "name"), [case for case in in_regimes(REGIMES) if SETTINGS[case.values[1]].has_limit]
)
def test_the_no_op_limit_is_bit_equal_to_a_run_without(name: str, regime: str) -> None:
    trick, settings = SETTINGS[name], REGIMES[regime]()
    asked = {regime: True, "accumulate": "accumulate_grad_batches" in settings, "clip": "clip" in regime}
    if refused := [REFUSED_BY[found] for found in asked if asked[found] and found in trick.refused]:
        message = refusal(trick, base=Net, **settings)
        assert any(found in message for found in refused)
        return
    compare = assert_close if trick.convolutions else assert_equal
    compare(run(trick, "off", Net, **settings), plain(name, Net, regime))
