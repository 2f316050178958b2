"""Whether an optimizer stepped, and whether Lightning knows of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
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


def refuse_steps_past_hooks(trainer: pl.Trainer, tricks: str, undo: ExitStack) -> None:
    """Raise before an optimizer steps without Lightning, whose hooks a trick depends on; until ``undo`` is closed.

    Args:
        trainer: A Trainer that has its optimizers.
        tricks: The names of the tricks, for the error message.
        undo: Takes back what is done for that.
    """
    inside = False

    def enter(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        before, inside = inside, True
        try:
            return original(*args, **kwargs)
        finally:
            inside = before

    def check(optimizer: Optimizer, *_: Any) -> None:
        if inside:
            return
        module = trainer.lightning_module
        name, kind = type(module).__name__, type(optimizer).__name__
        if module.automatic_optimization:
            where, remedy = f"{name}.optimizer_step", "call optimizer.step(closure=closure)"
        else:
            where, remedy = f"{name}.training_step", "step what self.optimizers() gives"
        raise MisconfigurationException(
            f"{where} steps {kind} past Lightning (as optimizer.optimizer.step() does), so that {tricks} would not see"
            f" the step: {remedy}."
        )

    undo.callback(wrap_method(trainer.strategy, "optimizer_step", enter))
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            undo.callback(optimizer.register_step_pre_hook(check).remove)
