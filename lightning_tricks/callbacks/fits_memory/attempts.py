"""Attempts at a step, undone when a rank runs out of memory; apart from the callback, which chooses what is tried."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.out_of_memory import free_memory_of, out_of_memory
from lightning_tricks.core.replay.own_batch import noting_writes
from lightning_tricks.core.replay.rerun import Start

T = TypeVar("T")


@dataclass
class Step:
    """A training step: how to run it, and what it started from.

    Args:
        run: The step, with its batch as the first argument.
        start: The state of the module and the random numbers.
        exchanges_buffers: Whether the next forward pass of DDP does so; None without DDP.
        after_forward: What the forward pass has left of the module and the random numbers, if hooks run before the
            backward pass.
    """

    run: partial[Any]
    start: Start
    exchanges_buffers: bool | None
    after_forward: Start | None = None


class Attempts:
    """Attempts at the steps of one fit.

    Args:
        trainer: The Trainer.
        undo: The stack that is closed when the fit ends.
        shrink: Function of a step that was undone and the error of this rank, if any; smaller parts are tried next.
    """

    def __init__(self, trainer: L.Trainer, undo: ExitStack, shrink: Callable[[Step, Exception | None], None]) -> None:
        self._trainer, self._shrink = trainer, shrink
        self._group: Any = None  # of the ranks, for numbers on the host, as devices are busy; None for one rank
        if trainer.world_size > 1 and dist.get_backend() == "gloo":
            self._group = dist.group.WORLD
        elif trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")
            undo.callback(dist.destroy_process_group, self._group)

    def begin(self, run: partial[Any]) -> Step:
        """A step that begins now."""
        module, model = self._trainer.lightning_module, self._trainer.strategy.model
        return Step(run, Start.here(module, module.device), getattr(model, "require_forward_param_sync", None))

    def until_it_fits(self, step: Step, work: Callable[[], T]) -> T:
        """What ``work`` returns, in the first attempt in which no rank runs out of memory."""
        while True:
            if (result := self.attempt(step, work)) is not None:
                return result

    def attempt(self, step: Step, work: Callable[[], T]) -> T | None:
        """What ``work`` returns; None if a rank ran out of memory in it, after which the step can be run anew."""
        result, failed = None, None
        module = self._trainer.lightning_module
        model: Any = self._trainer.strategy.model
        try:
            with step.start.state.watching(), noting_writes(module, (step.run.args, step.run.keywords)) as refuse:
                result = work()
        except Exception as error:
            if not out_of_memory(error):
                raise
            free_memory_of(error)
            failed = error.with_traceback(None)
        if not self.largest(int(failed is not None)):
            return result
        result = None  # of a rank that has not failed, with its activations
        try:
            refuse()
            step.start.state.refuse_writes()
            step.start.state.refuse_counts()
            step.start.set_back()
            if step.exchanges_buffers is not None:
                model.require_forward_param_sync = step.exchanges_buffers
            self._shrink(step, failed)
        except MisconfigurationException as error:
            raise error from failed
        return None

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self._group is None:
            return number
        dist.all_reduce(found := torch.tensor(number, device="cpu"), dist.ReduceOp.MAX, group=self._group)
        return int(found)
