"""The states of all random generators that a process draws from: the global ones, and those that objects hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from lightning_tricks.core.exact.own_state import generators_in
from lightning_tricks.core.exact.plain import content, plain, unplain
from lightning_tricks.core.random_numbers import random_state, seed_generators, set_random_state


class Generators:
    """The global random generators of torch, the device, Python and NumPy, and those that some objects hold.

    Args:
        device: The device that the process trains on.
        roots: The objects by their names, such as a data set with a generator for its augmentations.
    """

    def __init__(self, device: torch.device, roots: Mapping[str, Any]) -> None:
        self._device = device
        self._held = generators_in(roots)

    def state(self) -> dict[str, Any]:
        """The states of all of them; ``plain`` makes them fit for a checkpoint."""
        return {"global": random_state(self._device), "held": {path: leaf.get() for path, leaf in self._held.items()}}

    def load(self, state: Mapping[str, Any], *, held: bool = True) -> None:
        """Set those that are there to a state; the global ones only if not ``held``."""
        state, here = unplain(state), random_state(self._device)
        set_random_state({name: state["global"].get(name, here[name]) for name in here}, self._device)
        for path in state["held"].keys() & self._held.keys() if held else ():
            self._held[path].set(state["held"][path])

    def reseed(self, number: int) -> None:
        """Have other random numbers than those of the present state, which depend on it and on a number."""
        found = content((plain(random_state(self._device)), number))
        seed_generators(zlib.crc32(found), self._device)
