"""Running a step again, from the same random numbers and module state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import nn

from lightning_tricks.core.random_numbers import RandomState, random_numbers_of, random_state, set_random_state
from lightning_tricks.core.replay.module_state import ModuleState

_again = ContextVar("_again", default=False)
_runs = count()
_run = ContextVar("_run", default=-1)


def begin_run() -> None:
    """Begin a run that may be repeated."""
    _run.set(next(_runs))


@contextmanager
def replaying() -> Iterator[None]:
    """Repeat the run since ``begin_run`` inside the block."""
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def is_replaying() -> bool:
    """Whether a run is being repeated."""
    return _again.get()


def run_number() -> int:
    """The number of the present run; the same when it is repeated."""
    return _run.get()


@dataclass(frozen=True)
class Start:
    """What a run of a module starts from, so that it can be repeated or undone.

    Args:
        state: The state of the module.
        random: The state of the random generators.
        device: The device whose generator is among them.
    """

    state: ModuleState
    random: RandomState
    device: torch.device

    @classmethod
    def here(cls, module: nn.Module, device: torch.device | None = None, *, deep: bool = False) -> Start:
        """The start of a run that begins now.

        Args:
            module: The module.
            device: The device that it runs on; None for that of its first weight.
            deep: Whether the run may write into tensors inside containers, as in a ``ModuleState``.

        Raises:
            MisconfigurationException: For a module or a device whose state cannot be restored.
        """
        if device is None:
            device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
        return cls(ModuleState(module, deep=deep), random_state(device), device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw these random numbers inside the block, and keep what is written to; the generators are then as before.

        The module must be in this state when the block begins.
        """
        with random_numbers_of(self.random, self.device), self.state.watching():
            yield

    def set_back(self) -> None:
        """Set the module and the random generators back, for another attempt at a run that has failed."""
        self.state.restore()
        set_random_state(self.random, self.device)


@contextmanager
def undone(start: Start) -> Iterator[None]:
    """Run a module from ``start``, which is now, inside the block; it leaves no trace in module and generators."""
    try:
        with start.running():
            yield
    finally:
        start.state.restore()


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Put the layers back into their modes, of training or evaluation, at the end of the block."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


@contextmanager
def run_again(start: Start, *, at_once: bool = True) -> Iterator[Start]:
    """Set a module back to the start of its last run inside the block; it ends as that run has left it.

    ``with run_again(start) as again, again.running():`` repeats the run: the state, the random numbers and thereby the
    result are the same. A run in the block that is not under ``again.running()`` goes on with the random numbers.

    Args:
        start: What the last run has started from.
        at_once: Whether nothing else has run since.

    Yields:
        The start of the second run.

    Raises:
        MisconfigurationException: If one of the runs does what cannot be undone.
    """
    start.state.refuse_writes()
    if at_once:
        start.state.refuse_counts()
    again = replace(start, state=start.state.now())
    try:
        start.state.restore()
        yield again
        again.state.refuse_counts()
    finally:
        again.state.restore()
