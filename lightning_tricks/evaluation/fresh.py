"""What one fit leaves behind and the next must not find: objects that are used again, random numbers, seeds."""

from __future__ import annotations

import os
import re
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_tricks.core.lightning.trainer import callbacks_of

Part = tuple[str, Any]  # with its name for error messages


class Fresh:
    """Objects that fits have had; weak references, which keep nothing alive."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[Any]] = {}

    def require(self, maker: str, parts: Sequence[Part]) -> None:
        """Raise if a part was given before.

        Args:
            maker: What has made the parts, for error messages.
            parts: The parts, each with its name for error messages.

        Raises:
            MisconfigurationException: For a part of an earlier fit, and a Trainer that was used.
        """
        for name, part in parts:
            if isinstance(part, L.Trainer) and part.state.fn is not None:
                raise MisconfigurationException(
                    f"{maker} must make a new Trainer for every fit, got one that was used before: its epochs are over."
                )
            seen = self._seen.get(id(part))
            if seen is not None and seen() is part:
                raise MisconfigurationException(
                    f"{maker} must make everything new for every fit, got {name} of another fit again, which would"
                    " carry over what that one has learned: make it inside, or return copy.deepcopy(...)."
                )
            self._seen[id(part)] = weakref.ref(part)


def parts_of_module(module: L.LightningModule) -> list[Part]:
    """A module, its parameters and its buffers."""
    parameters = [(f"the parameter {name}", each) for name, each in module.named_parameters()]
    buffers = [(f"the buffer {name}", each) for name, each in module.named_buffers()]
    return [(f"the module {type(module).__name__}", module), *parameters, *buffers]


def parts_of_trainer(trainer: L.Trainer) -> list[Part]:
    """A Trainer, its plugins and its callbacks."""
    parts = (trainer, trainer.strategy, trainer.precision_plugin, *callbacks_of(trainer, Callback))
    return [(f"the {type(part).__name__}", part) for part in parts]


@contextmanager
def caller_unchanged() -> Iterator[None]:
    """Put random numbers and the seeds that Lightning keeps in the environment back at the end."""
    names = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    before = {name: os.environ.get(name) for name in names}
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


@contextmanager
def marked_is_empty(folder: Path) -> Iterator[None]:
    """Leave out the warning of a ModelCheckpoint that its folder is not empty: a new folder of ours has the marker."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"Checkpoint directory {re.escape(os.path.realpath(folder))} exists")
        yield
