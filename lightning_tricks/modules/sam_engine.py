"""What all ways of SAM have in common: a step is run again at perturbed weights, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.recorder import Step, StepRecorder
from lightning_tricks.core.replay import ModuleState, find_node, random_numbers_of, run_again, runs_again
from lightning_tricks.core.shards import LocalWeights
from lightning_tricks.core.trainer import grad_scaler
from lightning_tricks.core.weights import copy_
from lightning_tricks.modules.sam_rules import SAM

if TYPE_CHECKING:
    _Module = pl.LightningModule  # what the mixin is mixed into; at run time it is a plain class
else:
    _Module = object


def loss_of(output: Any) -> Tensor:
    """The loss in what a step returns."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            f"SAM needs a loss from both runs of a step, a tensor or 'loss' in a dictionary, got {loss!r}: return it at"
            " the perturbed weights too."
        )
    return loss


class SAMEngine(_Module):
    """Runs a step twice: for the gradient that perturbs the weights, and again there for the one to descend by."""

    sam: SAM = SAM()
    _sam_recorder: StepRecorder | None = None
    _sam_held: LocalWeights | None = None
    _sam_calls: dict[int, int] = {}  # noqa: RUF012  # of sam_step since the optimizer stepped; a new one at setup
    _sam_aside: tuple[list[Tensor], list[Tensor]] | None = None  # weights that are perturbed now, and their own values
    _sam_norm: Tensor | None = None  # of the last gradient

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        if not runs_again():
            super().log(*args, **kwargs)

    def _sam_twice(
        self, loss: Tensor, step: Step, weights: dict[Tensor, str], descend: Callable[[Tensor], None]
    ) -> Tensor:
        """Perturb by the gradient of the loss, run the step again and descend from its loss; gives the norm."""
        held = self._sam_held
        assert held is not None, "setup comes first"
        moved, gradients = self._sam_gradients(loss, list(weights))
        parts = [part for part in map(held.local, moved) if part is not None]
        with torch.no_grad():
            ours = [part.clone() for part in parts]
        after = ModuleState(self)
        try:
            step.state.restore()
            held.settle()
            self._sam_aside = parts, ours
            names = [weights[weight] for weight in moved]
            norm = self.sam.perturb_(parts, gradients, names, partial(held.norm, of=moved))
            del gradients  # which take as much memory as the weights
            with random_numbers_of(step.random, self.device):
                again = self._sam_loss(step.run)
            descend(again)
        finally:
            held.settle()
            copy_(parts, ours)
            after.restore()
            self._sam_aside = None
        self._sam_norm = norm / self._sam_scaled(torch.ones_like(norm))
        return self._sam_norm

    def _sam_gradients(self, loss: Tensor, trained: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The weights that the loss depends on, and this rank's part of their gradients; ``.grad`` is left alone."""
        assert self._sam_held is not None, "setup comes first"
        gradients = self._sam_held.gradients(loss, trained) if trained else []
        pairs = [(w, g) for w, g in zip(trained, gradients, strict=True) if g is not None]
        if len(pairs) < len(trained) and find_node(loss, "CheckpointFunctionBackward".__eq__):
            raise MisconfigurationException("SAM sees no gradient in a reentrant checkpoint: pass use_reentrant=False.")
        if any(gradient.is_sparse for _, gradient in pairs):
            raise MisconfigurationException("SAM works on dense gradients, got sparse ones: pass sparse=False.")
        return [weight for weight, _ in pairs], [gradient for _, gradient in pairs]

    def _sam_loss(self, run: Callable[[], Any]) -> Tensor:
        """The loss of the step run once more."""
        with run_again():
            return loss_of(run())

    def _sam_scaled(self, loss: Tensor) -> Tensor:
        """The loss divided and scaled as Lightning does with that of the first run."""
        if self.automatic_optimization:
            loss = loss / self.trainer.accumulate_grad_batches
        scaler = grad_scaler(self.trainer)
        return loss if scaler is None else scaler.scale(loss)

    def _sam_unsynced(self) -> AbstractContextManager[None]:
        """Inside it DDP keeps gradients to each rank."""
        return getattr(self.trainer.strategy, "block_backward_sync", nullcontext)()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sam_recorder": None, "_sam_aside": None, "_sam_held": None}
