"""SAM inside ``backward()``: a step is run again at perturbed weights, and nothing else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_tricks.core.batches.cutting import micro_batches, naming_single_samples
from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.trainer import scaled, step_schedules, unsynced
from lightning_tricks.core.random_numbers import random_state
from lightning_tricks.core.replay.containers import run_all
from lightning_tricks.core.replay.graph import find_graph_node, naming_reentrant_checkpoints, reentrant_checkpoint
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.replay.own_batch import with_own_batch
from lightning_tricks.core.replay.rerun import Start, begin_run, replaying, run_again
from lightning_tricks.core.weights.gradients import require_dense
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import copy_, gradients_kept, hidden_from_autograd
from lightning_tricks.modules.sam.misuse import ClosureGuard, ScheduleWatch, StepWatch, misuse, write_it_so
from lightning_tricks.modules.sam.recorder import RecordedStep, StepRecorder
from lightning_tricks.modules.sam.rules import SAM, perturbed_weights


class SAMEngine:
    """Runs a step twice: for the gradient that perturbs the weights, and at the perturbed weights for the optimizer's.

    Args:
        module: The module in a fit.
        sam: The settings.
        weights: The weights of the module that this process holds.
    """

    def __init__(self, module: L.LightningModule, sam: SAM, weights: LocalWeights) -> None:
        self.module = module
        self.sam = sam
        self.weights = weights
        self.recorder = StepRecorder()
        # The norm of the gradient that last perturbed the weights; None after a plain step.
        self.norm: Tensor | None = None
        self.perturbed: tuple[list[Tensor], list[Tensor]] | None = None  # weights moved now, and copies from before
        self.called = False  # Whether sam_backward or sam_step was called in this fit.
        self._has_descended = False
        self.closures, self.schedules, self.steps = ClosureGuard(module), ScheduleWatch(module), StepWatch(module)

    def descend(self, loss: Tensor, backward: Callable[[Tensor], None]) -> None:
        """Accumulate SAM's gradient in ``.grad``, in automatic optimization.

        Args:
            loss: The loss of the step that was recorded, divided and scaled by Lightning.
            backward: The module's own backward pass, of a loss.
        """
        step = self.recorder.take()
        if step is None:
            self.norm = None
            backward(loss)  # a step without a perturbation
            return
        self.weights.reshard()  # so that the module's parameters are the optimizer's
        weights = self._perturbed_weights([self.module.optimizers()])
        if self.sam.micro_batch_size is not None:
            self._descend_in_micro_batches(step, weights, backward, self.sam.micro_batch_size)
            return
        with self._loss_uphill(loss, step, weights) as uphill:
            backward(scaled(self.module.trainer, uphill))

    def _descend_in_micro_batches(
        self, full: RecordedStep, weights: dict[Tensor, str], backward: Callable[[Tensor], None], size: int
    ) -> None:
        """Perturb for each micro-batch by itself; the run of the full batch has logged and moved statistics."""
        trainer, norms, random = self.module.trainer, list[Tensor](), full.start.random
        with run_again(full.start):
            try:
                parts = micro_batches(full.run, size, f"SAM(micro_batch_size={size})", "leave micro_batch_size out")
                for number, (share, run) in enumerate(parts, 1):
                    step = RecordedStep(with_own_batch(run), replace(full.start, random=random))
                    step.start.state.restore()
                    with nullcontext() if number == len(parts) else unsynced(trainer):
                        with step.start.running(), self._naming(size):
                            loss = scaled(trainer, self._loss_again(run) * share)
                            random = random_state(self.module.device)
                        self._require_graph(loss)
                        with self._loss_uphill(loss, step, weights) as uphill:
                            backward(scaled(trainer, uphill * share if share < 1 else uphill))
                    assert self.norm is not None, "just measured"
                    norms.append(self.norm)
            finally:
                full.start.state.restore()  # also what only a part of the batch has led to
        self.norm = torch.stack(norms).sum()

    def _require_graph(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise MisconfigurationException(
                f"The loss of {type(self.module).__name__} depends on no weight that trains now, so that SAM has"
                " nothing to perturb: return None from training_step while everything is frozen."
            )

    def _naming(self, size: int) -> AbstractContextManager[None]:
        rule = f"SAM(micro_batch_size={size}) gives {type(self.module).__name__} a micro-batch of one sample"
        return naming_single_samples(rule, "choose a size above 1 that divides the size of the batch")

    def descend_by_hand(
        self, closure: Callable[[], Tensor], optimizer: Any = None, method: str = "sam_backward"
    ) -> Tensor:
        """Run ``SAMMixin.sam_backward``."""
        _check_closure(method, closure)
        self.called = True
        own = self.module.optimizers() if optimizer is None else optimizer
        begin_run()
        step = RecordedStep(partial(closure), Start.here(self.module, self.module.device))
        with self.closures.watching(method), step.start.state.watching():
            loss = loss_of(closure())
        weights = self._perturbed_weights(own if isinstance(own, list) else [own])
        first = scaled(self.module.trainer, loss)
        try:
            with self.steps.adding(method), self._loss_uphill(first, step, weights) as uphill:
                self.module.manual_backward(uphill)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                rule = f"the closure of {method} uses tensors of a forward pass outside of it"
                raise misuse(self.module, rule, method) from error
            raise
        return loss.detach()

    def step_by_hand(
        self,
        closure: Callable[[], Tensor],
        optimizer: LightningOptimizer | None,
        accumulate: int,
        clip_norm: float | None,
    ) -> Tensor:
        """Run ``SAMMixin.sam_step``."""
        _check_closure("sam_step", closure)
        _check_step(accumulate, clip_norm)
        own = self.module.optimizers() if optimizer is None else optimizer
        if isinstance(own, list):
            raise ValueError(f"sam_step needs one of the {len(own)} optimizers: pass optimizer=self.optimizers()[...].")
        if not isinstance(own, LightningOptimizer):
            raise TypeError(f"sam_step needs an optimizer of self.optimizers(), got {type(own).__name__}.")
        inner, watch = own.optimizer, self.steps
        if isinstance(inner, LBFGS):
            rule = "sam_step steps once, and LBFGS calls a closure: call sam_backward there"
            raise misuse(self.module, rule, "lbfgs")
        self.schedules.check(inner)
        calls = watch.calls.get(inner, 0) + 1
        if calls == 1:
            watch.clear_spent(inner)
        # Lightning ends a window with the epoch, too: its gradients would otherwise be added to those of the next one.
        ends = calls >= accumulate or self.module.trainer.is_last_batch

        def share() -> Tensor:
            loss = loss_of(closure()) / accumulate
            watch.require_kept(inner)
            return loss

        with nullcontext() if ends else unsynced(self.module.trainer), gradients_kept(self._weights_of_others(inner)):
            loss = self.descend_by_hand(share, own, "sam_step") * accumulate
        assert self.norm is not None, "just measured"
        self.norm *= accumulate  # measured on a share of the loss, and logged for the whole
        watch.calls[inner] = 0 if ends else calls
        if ends:
            if clip_norm is not None:
                limit = float(scaled(self.module.trainer, torch.tensor(clip_norm, device=self.module.device)))
                self.module.clip_gradients(inner, gradient_clip_val=limit, gradient_clip_algorithm="norm")
            with watch.stepping():
                own.step()
            own.zero_grad()
            step_schedules(self.module.trainer, inner)
        self.schedules.stepped(inner)
        return loss

    def _weights_of_others(self, optimizer: Optimizer) -> list[Tensor]:
        """The weights that other optimizers step and this one does not."""
        own = set(weights_of(optimizer))
        return [w for other in self.module.trainer.optimizers for w in weights_of(other) if w not in own]

    @contextmanager
    def _loss_uphill(self, loss: Tensor, step: RecordedStep, weights: dict[Tensor, str]) -> Iterator[Tensor]:
        """The loss of a step at weights that are perturbed inside the block, by the gradient of its first loss.

        At the end of the block the weights are themselves again, and the module is as the first run has left it.
        """
        moved, gradients = gradients_of(loss, list(weights), self.weights)
        if not moved and self.sam.parameters is None and not self.module.automatic_optimization:
            raise MisconfigurationException(
                f"The loss of {type(self.module).__name__} depends on no weight that SAM perturbs: pass the optimizer"
                " of the weights that it trains as optimizer=."
            )
        parts = self._parts(moved)
        with torch.no_grad():
            before = [part.clone() for part in parts]
        # The weights move and return between two passes; a graph that keeps them would refuse its backward pass.
        with hidden_from_autograd(parts):
            try:
                with run_again(step.start) as again:
                    self.weights.reshard()
                    parts = self._parts(moved)  # the step may have given a weight another .data
                    self.perturbed = parts, before
                    names = [weights[weight] for weight in moved]
                    norm = self.sam.perturb_(parts, gradients, names, partial(self.weights.norm, of=moved))
                    del gradients  # Frees as much memory as the weights take.
                    with again.running():
                        uphill = self._loss_again(step.run)
                    # What hooks of gradients draw or log is no part of the second run.
                    with self._refusing_changes():
                        yield uphill
            finally:
                # Last, since run_again restores weights that the second run wrote to, as they were when perturbed.
                run_all([self.weights.reshard, partial(copy_, parts, before)])
                self.perturbed = None
        self.norm = norm / scaled(self.module.trainer, torch.ones_like(norm))

    def _parts(self, weights: list[Tensor]) -> list[Tensor]:
        """This rank's parts of weights."""
        return [part for part in map(self.weights.local, weights) if part is not None]

    @contextmanager
    def _refusing_changes(self) -> Iterator[None]:
        """Refuse what the backward pass in the block changes besides gradients, since it would be undone."""
        looks = not self._has_descended and _acts_in_backward(self.module)  # looking once is enough, and costs time
        state = ModuleState(self.module, compared=True) if looks else None
        yield
        if state is not None and (path := state.changed()) is not None:
            raise MisconfigurationException(
                f"SAM restores what a training step has changed, and {path} is changed in the backward pass, by"
                f" {type(self.module).__name__}.backward or a hook of a parameter or tensor: change it in"
                " on_after_backward or on_train_batch_end."
            )
        self._has_descended = True

    def _perturbed_weights(self, optimizers: list[Any]) -> dict[Tensor, str]:
        """The weights that are perturbed, of those that optimizers train."""
        if any(weight.requires_grad for optimizer in optimizers for weight in weights_of(optimizer)):
            return perturbed_weights(self.module, self.sam, optimizers)
        raise MisconfigurationException(
            f"SAM perturbs the weights that {type(self.module).__name__}'s optimizer trains, and found none: return the"
            " optimizer from configure_optimizers, or pass the one of weights that are not frozen (by toggle_optimizer,"
            " say) as optimizer=."
        )

    def _loss_again(self, run: Callable[[], Any]) -> Tensor:
        """The loss of the step run once more."""
        with replaying():
            return loss_of(run())


def gradients_of(loss: Tensor, trained: list[Tensor], weights: LocalWeights) -> tuple[list[Tensor], list[Tensor]]:
    """The weights that the loss depends on, and this rank's part of their gradients; ``.grad`` is left alone."""
    with naming_reentrant_checkpoints(loss, "SAM"):
        gradients = weights.gradients(loss, trained) if trained else []
    pairs = [(w, g) for w, g in zip(trained, gradients, strict=True) if g is not None]
    if len(pairs) < len(trained) and find_graph_node(loss, "CheckpointFunctionBackward".__eq__):
        raise reentrant_checkpoint("SAM")
    require_dense(weights.module, pairs, "SAM")
    return [weight for weight, _ in pairs], [gradient for _, gradient in pairs]


def _acts_in_backward(module: L.LightningModule) -> bool:
    """Whether code of the user's runs in the backward pass: a ``backward`` of the module's own, or hooks of weights."""
    ours = ("lightning_tricks.", "lightning.pytorch.")
    own = any("backward" in vars(kind) and not kind.__module__.startswith(ours) for kind in type(module).__mro__)
    return own or any(w._post_accumulate_grad_hooks or w._backward_hooks for w in module.parameters())


def loss_of(output: Any) -> Tensor:
    """The loss in what a step returns.

    Raises:
        MisconfigurationException: If there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            f"SAM needs a loss from both runs of a step, a tensor or 'loss' in a dictionary, got {loss!r}: return it at"
            " the perturbed weights too."
        )
    return loss


def _check_closure(method: str, closure: object) -> None:
    if not callable(closure):
        raise TypeError(
            f"{method} needs a function that computes the loss, got {type(closure).__name__}: the forward pass is run"
            f" twice, so it belongs inside the function. {write_it_so(method)}"
        )


def _check_step(accumulate: int, clip_norm: float | None) -> None:
    check_count("accumulate", accumulate)
    if clip_norm is None:
        return
    check_range("clip_norm", clip_norm, 0.0)
    if clip_norm == 0:  # Lightning takes 0 for no clipping.
        raise ValueError(f"clip_norm must be above 0, got {clip_norm}: leave it out for no clipping.")
