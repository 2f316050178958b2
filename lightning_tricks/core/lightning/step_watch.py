"""Whether an optimizer stepped, and whether it did so through Lightning."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.patching import wrap_method


class StepObserver:
    """Tells whether an optimizer of the module's parameters stepped, also one that Lightning does not know.

    ``global_step`` also counts steps that the GradScaler skips. An optimizer's own hook runs only for real steps.
    """

    def __init__(self) -> None:
        self.known = False  # whether one of the Trainer's optimizers stepped since the start
        self._stepped = False
        self._watched: list[Any] | None = None
        self._undo = ExitStack()

    def start(self, trainer: L.Trainer) -> None:
        """Watch the Trainer's optimizers from now on."""
        self.stop()
        self._stepped = self.known = False
        self.follow(trainer)

    def follow(self, trainer: L.Trainer) -> None:
        """Watch the Trainer's optimizers if they were replaced."""
        watched, now = self._watched, trainer.optimizers
        if watched is not None and len(watched) == len(now) and all(map(operator.is_, watched, now)):
            return
        self.stop()
        self._watched = list(trainer.optimizers)
        for optimizer in self._watched:
            self._undo.callback(self._watch(optimizer))
        self._undo.callback(wrap_method(trainer.strategy, "optimizer_state", self._unseen))
        unknown = partial(self._note_unknown, trainer.lightning_module, self._watched)
        self._undo.callback(register_optimizer_step_post_hook(unknown).remove)

    def _watch(self, optimizer: Any) -> Callable[[], None]:
        # DeepSpeed's optimizer is not a torch Optimizer, but calls one inside when it steps.
        own = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", optimizer)
        if hasattr(own, "_optimizer_step_post_hooks"):
            return own.register_step_post_hook(self._note).remove
        return wrap_method(own, "step", self._step)  # a class without torch's step hooks

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._stepped = self.known = True
        return result

    def _unseen(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """To save an optimizer without states under FSDP2, torch steps it with zero gradients."""
        before = self._stepped, self.known
        try:
            return original(*args, **kwargs)
        finally:
            self._stepped, self.known = before

    def stop(self) -> None:
        """Watch no optimizer any more."""
        self._watched = None
        self._undo.close()

    def stepped(self) -> bool:
        """Whether any optimizer stepped since the last call."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step by itself
        if found_inf is None or not found_inf.item():
            self._stepped = self.known = True

    def _note_unknown(self, module: nn.Module, known: list[Any], optimizer: Optimizer, *_: object) -> None:
        if not self._stepped and not any(optimizer is one for one in known) and holds_parameters(optimizer, module):
            self._stepped = True


def refuse_steps_past_hooks(trainer: L.Trainer, tricks: str, undo: ExitStack) -> None:
    """Raise before an optimizer step that bypasses Lightning's hooks, until ``undo`` is closed.

    Args:
        trainer: A Trainer that has its optimizers.
        tricks: The names of the tricks that need these hooks, for the error message.
        undo: The stack to which the removal of the checks is added.
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
        module = trainer.lightning_module
        if inside or not holds_parameters(optimizer, module):
            return
        name, kind = type(module).__name__, type(optimizer).__name__
        if module.automatic_optimization:
            where, remedy = f"{name}.optimizer_step", "call optimizer.step(closure=closure)"
        else:
            where, remedy = f"{name}.training_step", "step what self.optimizers() returns"
        raise MisconfigurationException(
            f"{where} steps {kind} past Lightning (as optimizer.optimizer.step() does), so that {tricks} would not see"
            f" the step: {remedy}."
        )

    undo.callback(wrap_method(trainer.strategy, "optimizer_step", enter))
    undo.callback(wrap_method(trainer.strategy, "optimizer_state", enter))  # torch may step to save, see StepObserver
    undo.callback(register_optimizer_step_pre_hook(check).remove)  # also for optimizers that Lightning does not know


def holds_parameters(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether an optimizer trains a parameter of the module."""
    own = {id(parameter) for parameter in module.parameters()}
    return any(id(weight) in own for weight in weights_of(optimizer))
