"""Random numbers are drawn again from the state that the generators had, which then go on."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.random_numbers import random_numbers_from, random_numbers_of, random_state, set_random_state
from tests.device.devices import EVERY, device

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_the_same_numbers_are_drawn_again_and_the_generators_go_on() -> None:
    state = random_state(CPU)
    first = draw()
    with random_numbers_of(state, CPU):
        assert draw() == first
        draw()
    second = draw()
    with random_numbers_of(state, CPU):
        assert (draw(), draw()) == (first, second)


def test_the_generators_go_on_after_an_exception() -> None:
    state = random_state(CPU)
    draw()
    at = random_state(CPU)
    expected = draw()
    with random_numbers_of(at, CPU):
        pass
    with random_numbers_of(state, CPU), pytest.raises(KeyboardInterrupt), random_numbers_of(at, CPU):
        raise KeyboardInterrupt
    with random_numbers_of(at, CPU):
        assert draw() == expected


def test_a_state_drawn_from_stays_what_it_was() -> None:
    state = random_state(CPU)
    for _ in range(2):
        with random_numbers_of(state, CPU):
            values = draw()
    with random_numbers_of(state, CPU):
        assert draw() == values


@pytest.mark.parametrize("on", EVERY)
def test_the_devices_generator_is_among_them(on: str) -> None:
    with device(on) as there:
        require_the_same_numbers(torch.device(there.name, 0))


def require_the_same_numbers(at: torch.device) -> None:
    """Of the generator of a device."""
    state = random_state(at)
    first = torch.rand(3, device=at)
    with random_numbers_of(state, at):
        assert torch.equal(torch.rand(3, device=at), first)
    with random_numbers_from(5, at):
        seeded = torch.rand(3, device=at)
    second = torch.rand(3, device=at)
    with random_numbers_from(5, at):
        assert torch.equal(torch.rand(3, device=at), seeded)
    set_random_state(state, at)
    assert torch.equal(torch.rand(3, device=at), first)
    assert torch.equal(torch.rand(3, device=at), second)


def test_a_device_without_a_generator_that_can_be_set_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"torch cannot set for a device of type 'hpu': train on cuda"):
        random_state(torch.device("hpu", 0))
    random_state(torch.device("meta"))  # which draws nothing
