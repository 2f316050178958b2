"""Recording of the training step that SAM runs again; apart from the engine, which runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.own_batch import forbid_writes, with_own_batch
from lightning_tricks.core.replay.rerun import Start, begin_run
from lightning_tricks.core.replay.trial import WithoutGradients, gradients_inside


@dataclass
class RecordedStep:
    """A training step: how to run it again, and what it started from."""

    run: partial[Any]
    start: Start


class StepRecorder:
    """Records every training step at the strategy: with the batch that the module got, under autocast and DDP."""

    def __init__(self) -> None:
        self.step: RecordedStep | None = None
        self._undo = ExitStack()
        self._wanted: Callable[[], bool] = lambda: True
        self._gradients, self._without_gradients = True, WithoutGradients()

    def start(
        self, trainer: L.Trainer, module: L.LightningModule, wanted: Callable[[], bool], *, gradients: bool = True
    ) -> None:
        """Record the steps of ``module`` from now on while ``wanted()``; without ``gradients`` they return no graph."""
        self._wanted, self._gradients, self._without_gradients = wanted, gradients, WithoutGradients()
        self._undo.callback(wrap_method(trainer.strategy, "training_step", partial(self._record, module)))

    def stop(self) -> None:
        """Stop recording, and forget the last step."""
        self.step = None
        self._undo.close()

    def take(self) -> RecordedStep | None:
        """Return the last step and forget it; None if it was not recorded."""
        step, self.step = self.step, None
        return step

    def _record(self, module: L.LightningModule, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.step = None  # forgets a step that returned None
        if not (torch.is_grad_enabled() and self._wanted()):  # scoring and recalibration run without gradients
            return original(*args, **kwargs)
        begin_run()
        run = partial(original, *args, **kwargs)
        step = RecordedStep(with_own_batch(run), Start.here(module, module.device))
        with step.start.state.watching(), forbid_writes(module, (args, kwargs)):
            output = run() if self._gradients else self._run_without_graph(module, run, step)
        self.step = step
        return output

    def _run_without_graph(self, module: L.LightningModule, run: Callable[[], Any], step: RecordedStep) -> Any:
        def attempt(gradients: bool) -> Any:
            with torch.no_grad(), gradients_inside(module) if gradients else nullcontext():
                return run()

        def again() -> None:
            nonlocal run
            run = with_own_batch(step.run)
            step.start.set_back()

        return _without_graph(self._without_gradients(module, attempt, again))


def _without_graph(output: Any) -> Any:
    """What a step returns, with a loss of its own graph: others ask a loss whether it has a gradient."""
    if isinstance(output, Tensor):
        return output.detach().requires_grad_()
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"].detach().requires_grad_()}
    return output
