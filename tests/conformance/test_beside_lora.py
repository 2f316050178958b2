"""Beside LoRA the frozen weights stay, a trick does what it does, and at its no-op limit LoRA trains as without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import lightning_tricks as lt
from tests.conformance.runs import refusal, run
from tests.conformance.settings import SETTINGS, quick
from tests.conformance.test_no_op import needs_own
from tests.conformance.trick import Trick
from tests.nets import NormNet, assert_close, assert_equal, build

BASE = "base_layer."  # which peft puts before the names of frozen weights


def beside(name: str, state: str) -> dict[str, Tensor]:
    return run(SETTINGS[name], state, callbacks=[lora(SETTINGS[name])])


def lora(trick: Trick) -> lt.LoRA:
    return lt.LoRA(r"layers\.1$" if trick.convolutions else r"layers\.0$", r=2, train=r"layers\.[2-9]")


@cache
def alone(name: str) -> dict[str, Tensor]:
    """LoRA in the network of a trick."""
    trick = SETTINGS[name]
    names = ("images", "grows", "convolutions", "experts", "wide")
    return run(Trick(**{needed: getattr(trick, needed) for needed in names}), callbacks=[lora(trick)])


@pytest.mark.filterwarnings("ignore:Doctor, frozen-parameters")  # of which adapters have some
@pytest.mark.parametrize("name", quick("EMA", "Mixup", "QAT", "SAMMixin", "StepInBackward", "SWA"))
def test_a_trick_beside_adapters(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    if name == "LoRA":
        cell(name, "LoRA", "none", "itself")
        return
    if "LoRA" in trick.refused:
        message = refusal(trick, callbacks=[lora(trick)])
        assert name in message
        cell(name, "LoRA", "refused", message)
        return
    plain, on = alone(name if needs_own(trick) else "EMA"), beside(name, "on")
    untrained = build(trick.plain(NormNet)).state_dict()
    frozen = [key for key in on if BASE in key]
    assert frozen
    assert all(torch.equal(on[key], untrained[key.replace(BASE, "")]) for key in frozen)
    compare = assert_close if trick.convolutions else assert_equal
    if trick.neutral:
        compare(on, plain)
    else:
        assert any(not torch.equal(on[key], plain[key]) for key in plain)
    compare(beside(name, "off"), plain)
    cell(name, "LoRA")
