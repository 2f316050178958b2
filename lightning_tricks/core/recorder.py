"""Keeps the training step that runs, to be run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.replay import ModuleState, RandomState, random_state, rebuilt, tensors_in, versions
from lightning_tricks.core.trainer import wrap_method


@dataclass
class Step:
    """A training step that ran: how to run it again, and what it started from."""

    run: Callable[[], Any]
    random: RandomState
    state: ModuleState


class StepRecorder:
    """Records each training step at the strategy, so with the batch as the module got it and under autocast and DDP."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self._unwrap: Callable[[], None] | None = None

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Record the steps of ``module`` from now on."""
        self._unwrap = wrap_method(trainer.strategy, "training_step", partial(self._record, module))

    def stop(self) -> None:
        """Record no more and forget the last step."""
        self.step = None
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def take(self) -> Step:
        """The step that ran, which is forgotten here."""
        step, self.step = self.step, None
        assert step is not None, "no step was recorded"
        return step

    def _record(self, module: pl.LightningModule, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        again = partial(original, *rebuilt(args), **rebuilt(kwargs))
        self.step = Step(again, random_state(module.device), ModuleState(module))
        tensors = tensors_in((args, kwargs))
        frozen = {name: weight for name, weight in module.named_parameters() if not weight.requires_grad}
        before, kept = versions(tensors), versions(list(frozen.values()))
        output = original(*args, **kwargs)
        if (now := versions(list(frozen.values()))) != kept:
            name = next(name for name, a, b in zip(frozen, kept, now, strict=True) if a != b)
            raise MisconfigurationException(
                f"{type(module).__name__}.training_step writes into the frozen parameter {name}, which a second run of"
                " it would do again: update it in on_train_batch_end."
            )
        if versions(tensors) != before:
            raise MisconfigurationException(
                f"{type(module).__name__}.training_step writes into its batch, which a second run of it would see: make"
                " a new tensor, for example x = x * 2 in place of x.mul_(2)."
            )
        return output
