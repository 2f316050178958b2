"""The state that objects have of their own comes back in others that were made in the same way."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch

from lightning_tricks.core.exact.own_state import OwnState, generators_in


def round_trip(state: Any) -> Any:
    """A state as a checkpoint gives it back."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Part:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)


class Owner:
    """Has everything that a sampler may have."""

    size = 4

    def __init__(self, samples: Any = (), size: int = 4) -> None:
        self.samples, self.size, self.passes = samples, size, 0
        self.order, self.left, self.seen = list(range(20_000)), deque([1, 2]), {3}
        self.counts, self.scale, self.weights = {"a": 0}, torch.ones(3), np.ones(3)
        self.parts, self.torch, self.python = [Part()], torch.Generator().manual_seed(1), random.Random(2)
        self.old, self.call = np.random.RandomState(4), partial(print, Part())
        self.opened = open  # no value

    def draw(self) -> list[float]:
        drawn = [float(torch.rand((), generator=self.torch)), self.python.random(), float(self.old.rand())]
        return [*drawn, float(self.parts[0].rng.random()), float(self.call.args[0].rng.random())]

    def advance(self) -> None:
        self.passes += 1
        self.python.shuffle(self.order)
        self.left.popleft()
        self.seen.add(self.passes)
        self.counts["a"] += 1
        self.scale.mul_(2)
        self.weights *= 3
        self.later = [self.passes]
        self.draw()


def values(owner: Owner) -> Any:
    return {name: repr(value) for name, value in vars(owner).items() if " at 0x" not in repr(value)}


def test_what_has_changed_comes_back_in_another_one() -> None:
    owner, other = Owner(), Owner()
    own = OwnState({"sampler": owner})
    owner.advance()
    state = round_trip(own.state())
    order = other.order
    OwnState({"sampler": other}).load(state)
    assert values(other) == values(owner)
    assert other.order is order  # which something else may hold
    assert other.draw() == owner.draw()


def test_settings_stay_and_what_is_apart_is_left_out() -> None:
    samples = Part()
    owner, other = Owner(samples), Owner(Part(), size=5)
    own = OwnState({"sampler": owner}, apart=[samples])
    before = own.state()
    assert before["sampler.size"] == 4  # not known yet to be a setting
    owner.advance()
    state = own.changed(own.state())
    assert {"sampler.passes", "sampler.order", "sampler.later"} <= state.keys()
    assert not [path for path in state if path.startswith(("sampler.samples", "sampler.size"))]
    assert "sampler.passes" in own.changed(before)  # with the value from before
    OwnState({"sampler": other}).load(state)
    assert (other.size, other.passes) == (5, 1)


def test_a_state_dict_is_asked_in_place_of_attributes() -> None:
    class Told(Owner):
        def state_dict(self) -> dict[str, int]:
            return {"passes": self.passes}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.passes = 10 * state["passes"]

    owner, other = Told(), Told()
    own = OwnState({"sampler": owner})
    owner.advance()
    assert own.state() == {"sampler": {"passes": 1}}
    OwnState({"sampler": other}).load(own.state())
    assert other.passes == 10


@pytest.mark.parametrize(
    "held", [lambda: [Owner()], lambda: {"a": Owner()}, lambda: Owner().draw], ids=["[]", "{}", "()"]
)
def test_generators_are_found_in_containers_and_behind_methods(held: Any) -> None:
    assert len(generators_in({"data": held()})) == 5
