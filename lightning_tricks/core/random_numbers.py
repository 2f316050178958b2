"""The states of the random generators that a training step may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

RandomState = dict[str, Any]
NONE_OF_ITS_OWN = ("cpu", "meta")  # types of devices that have no generator beside torch's


def random_state(device: torch.device) -> RandomState:
    """The state of the generators that a step on ``device`` may draw from: torch, the device, Python, NumPy.

    Raises:
        MisconfigurationException: If torch does not tell the state of the device's generator.
    """
    state: RandomState = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type not in NONE_OF_ITS_OWN:
        state[device.type] = _generators(device).get_rng_state(device)
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Set the generators to a state of ``random_state``."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type in state:
        _generators(device).set_rng_state(state[device.type], device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def drawn_since(state: RandomState, device: torch.device) -> str | None:
    """The name of a generator that numbers were drawn from since a state of ``random_state``; None if from none."""
    now = random_state(device)
    return next((name for name, before in state.items() if not _same(before, now[name])), None)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    same = one == other  # of each number, where they are a tensor or an array
    return bool(same if isinstance(same, bool) else same.all())


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
        seed_generators(seed, device)
        yield
    finally:
        set_random_state(outside, device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Have the generators draw the random numbers of a seed (32 bits)."""
    torch.random.default_generator.manual_seed(seed)
    random.seed(seed)
    if device.type == "xla":
        _generators(device).set_rng_state(seed, device)
    elif device.type not in NONE_OF_ITS_OWN:
        module = _generators(device)
        with getattr(module, "device", nullcontext)(device):  # manual_seed is for the current device
            module.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _generators(device: torch.device) -> Any:
    """The module for a device's type (torch.cuda, torch.mps, torch.xpu), which knows its generator."""
    if device.type == "xla":  # whose module is not torch's, and whose state is a number
        return import_module("torch_xla.core.xla_model")
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        raise MisconfigurationException(
            "A step that is run a second time must draw the same random numbers, which torch cannot set for a device of"
            f" type {device.type!r}: train on cuda, mps, xpu, xla or cpu, or leave the trick out."
        ) from None
