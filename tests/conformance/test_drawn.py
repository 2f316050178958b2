"""Weights that a module draws in hooks of its own when training starts, which run after those of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt
from tests.conformance.runs import fitted
from tests.conformance.settings import SETTINGS, every_third
from tests.nets import Net, NormNet, assert_equal, weights


def draw(module: Any) -> None:
    """Give each weight its values, the same ones at every call, through ``.data`` as older projects do."""
    for number, weight in enumerate(module.parameters()):
        weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))


def draw_first(module: Any, *_: Any) -> None:
    if module.trainer.global_step == 0:
        draw(module)


def drawing(base: type[Net], hook: str, *, before: bool) -> type[Net]:
    """``base`` that draws its weights in a hook; and when it is made as well, so that the hook changes nothing."""

    def make(module: Any) -> None:
        base.__init__(module)
        if before:
            draw(module)

    return type(base)("Net", (base,), {"__init__": make, hook: draw_first})


def ends(name: str, hook: str = "on_train_start", *others: Callable[[], Callback]) -> list[dict[str, torch.Tensor]]:
    """The end weights of a fit whose weights are there from the first, and of one that draws them in a hook."""
    trick = SETTINGS[name]
    return [
        weights(
            fitted(
                drawing(trick.module(NormNet, "on"), hook, before=before),
                callbacks=[*trick.make_callbacks("on"), *(other() for other in others)],
            )
        )
        for before in (True, False)
    ]


# Adapters are made before; tests/callbacks/test_lora.py has the refusal.
NAMES = [param for param in every_third(1) if not str(param.values[0]).startswith("LoRA")]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", NAMES)
def test_weights_drawn_in_on_train_start_are_those_that_train(name: str) -> None:
    there, drawn = ends(name)
    assert_equal(drawn, there)


class Draws(Callback):
    """A callback of the user's own behind the tricks."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        draw_first(pl_module)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["EMA", "SWA", "ScheduleFree"])
def test_averages_begin_behind_every_hook(name: str) -> None:
    for hook in ("on_train_epoch_start", "on_train_batch_start"):
        there, drawn = ends(name, hook)
        assert_equal(drawn, there)
    there, drawn = ends(name, "another_method", Draws)
    assert_equal(drawn, there)


def first_values(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A forward pass that gives weights their values from its first batch, as those of flows do."""
    if module.training and module.trainer.global_step == 0:
        draw(module)
    return NormNet.forward(module, x)


@pytest.mark.parametrize("name", ["EMA", "SWA", "ScheduleFree"])
def test_averages_begin_with_the_values_of_a_first_forward_pass(name: str) -> None:
    trick, ended = SETTINGS[name], []
    for before in (True, False):
        base = drawing(trick.module(NormNet, "on"), "another_method", before=before)
        kind = type(base)("Net", (base,), {"forward": first_values})
        ended.append(weights(fitted(kind, callbacks=trick.make_callbacks("on"))))
    assert_equal(ended[1], ended[0])


def test_the_average_of_weights_that_are_one_is_one() -> None:
    class Ones(NormNet):
        def on_train_start(self) -> None:
            for weight in self.parameters():
                weight.data.fill_(1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    averaged = weights(fitted(Ones, callbacks=[lt.EMA(0.999, warmup=False)]))
    assert all(value.eq(1).all() for name, value in averaged.items() if name.endswith(("weight", "bias")))
