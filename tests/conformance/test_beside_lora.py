"""Beside LoRA a trick trains what a plain loop with both trains, and frozen weights stay.

At its no-op limit it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import lightning_tricks as lt
from tests.conformance.runs import beside_the_plain_loop, refusal, run
from tests.conformance.settings import SETTINGS, quick
from tests.conformance.trick import Enrolment, public_name, together
from tests.nets import NormNet, assert_close, assert_equal, build, loader
from tests.reference.lora import LowRank

BASE = "base_layer."  # which peft puts before the names of frozen weights


def adapters(trick: Enrolment) -> Enrolment:
    """LoRA in a linear layer of the network that a trick needs."""
    layer = 5 if trick.convolutions else 0
    train = rf"layers\.[^{layer}]"
    return replace(
        SETTINGS["LoRA"],
        callbacks={"on": lambda: [lt.LoRA(rf"layers\.{layer}", r=2, train=train)]},
        naive=lambda batches, seen: LowRank(layer=layer),
    )


@cache
def alone(bare: Enrolment) -> dict[str, Tensor]:
    return run(bare, callbacks=adapters(bare).make_callbacks("on"))


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:Doctor, frozen-parameters")  # of which adapters have some
@pytest.mark.parametrize("name", quick("EMA", "Mixup", "QAT", "SAMMixin", "StepInBackward", "SWA"))
def test_a_trick_beside_adapters(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    if public_name(name) == "LoRA":
        cell(name, "LoRA", "none", "itself")
        return
    lora = adapters(trick)
    if "LoRA" in trick.refused:
        message = refusal(trick, callbacks=lora.make_callbacks("on"))
        assert public_name(name) in message
        cell(name, "LoRA", "refused", message)
        return
    ended, expected, _ = beside_the_plain_loop(together(lora, trick), loader(36), {})
    assert_close(ended, expected)
    untrained = build(trick.plain(NormNet)).state_dict()
    frozen = [key for key in ended if BASE in key]
    assert frozen
    assert all(torch.equal(ended[key], untrained[key.replace(BASE, "")]) for key in frozen)
    if trick.has_limit:
        compare = assert_close if trick.convolutions else assert_equal
        compare(run(trick, "off", callbacks=lora.make_callbacks("on")), alone(trick.bare()))
    cell(name, "LoRA")
