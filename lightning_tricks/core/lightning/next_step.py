"""What is to happen around the next training step, after all hooks that come before it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import lightning as L

from lightning_tricks.core.lightning.patching import wrap_method


def around_next_step(trainer: L.Trainer, undo: ExitStack, block: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the next training step inside a context.

    A module's own ``on_train_start`` and ``on_train_batch_start`` come after those of callbacks, and may draw or load
    weights. This is the first point after them.

    Args:
        trainer: A Trainer in a fit.
        undo: The stack that a trick closes when the fit ends, in case that there is no next step.
        block: A function that makes the context.
    """

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        remove()
        with block():
            return original(*args, **kwargs)

    remove = wrap_method(trainer.strategy, "training_step", step)
    undo.callback(remove)
