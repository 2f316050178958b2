"""The states of the random generators that a training step may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

RandomState = dict[str, Any]


def random_state(device: torch.device) -> RandomState:
    """The state of the generators that a step on ``device`` may draw from: torch, the device, Python, NumPy."""
    state: RandomState = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Set the generators to a state of ``random_state``."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


@contextmanager
def random_numbers_of(state: RandomState, device: torch.device) -> Iterator[None]:
    """Draw from ``state`` inside the block; the generators are restored at its end."""
    outside = random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(outside, device)


@contextmanager
def random_numbers_from(seed: int, device: torch.device) -> Iterator[None]:
    """Draw the random numbers of a seed (32 bits) inside the block; the generators are restored at its end."""
    outside = random_state(device)
    try:
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        yield
    finally:
        set_random_state(outside, device)
