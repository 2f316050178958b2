"""Whether an optimizer stepped."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_tricks.core.lightning.patching import wrap_method


class StepObserver:
    """Tells whether an optimizer stepped.

    ``global_step`` moves too when the GradScaler skips a step; an optimizer's own hook runs only when it does step.
    """

    def __init__(self) -> None:
        self._stepped = False
        self._watched: list[Any] = []
        self._undo = ExitStack()

    def start(self, trainer: pl.Trainer) -> None:
        """Watch the Trainer's optimizers from now on."""
        self.stop()
        self._stepped = False
        self.follow(trainer)

    def follow(self, trainer: pl.Trainer) -> None:
        """Watch other optimizers if the Trainer has others now."""
        if len(self._watched) == len(trainer.optimizers) and all(map(operator.is_, self._watched, trainer.optimizers)):
            return
        self.stop()
        self._watched = list(trainer.optimizers)
        for optimizer in self._watched:
            self._undo.callback(self._watch(optimizer))

    def _watch(self, optimizer: Any) -> Callable[[], None]:
        # DeepSpeed's own is no torch Optimizer but has one, which it calls when it does step
        own = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", optimizer)
        if hasattr(own, "_optimizer_step_post_hooks"):
            return own.register_step_post_hook(self._note).remove
        return wrap_method(own, "step", self._step)  # one that does not call Optimizer.__init__, or is none

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._stepped = True
        return result

    def stop(self) -> None:
        """Leave the optimizers as they were."""
        self._watched = []
        self._undo.close()

    def stepped(self) -> bool:
        """Whether any stepped since this was last asked."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer is called and itself skips the step
        if found_inf is None or not found_inf.item():
            self._stepped = True
