"""Steps that run out of memory are run again in micro-batches, which are kept for the rest of the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.callbacks.fits_memory.attempts import Attempts, Step
from lightning_tricks.callbacks.fits_memory.descent import descend
from lightning_tricks.callbacks.fits_memory.parts import PASS_COUNT, Forward, StepInParts, trained_weights
from lightning_tricks.core.batches.cutting import count_samples
from lightning_tricks.core.checks import check_count
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import UNSHARDED, require_engine
from lightning_tricks.core.lightning.trainer import (
    callbacks_of,
    has_comm_state,
    is_fitting,
    log_every_n_steps,
    takes_dataloader_iter,
)
from lightning_tricks.core.mixed_targets.divisors import Count
from lightning_tricks.core.mixed_targets.target import plain_tensor
from lightning_tricks.core.out_of_memory import out_of_memory
from lightning_tricks.core.random_numbers import drawn_since, random_state
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.replay.rerun import Start, is_replaying, replaying
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.gradients import GradientsBefore

__all__ = ["FitsMemory"]

_LOG = list(inspect.signature(L.LightningModule.log).parameters)[1:]  # the names of its arguments


@final
class FitsMemory(Trick):
    """Runs a training step again in micro-batches when it runs out of memory, and keeps their size for the next steps.

    The batch is cut into parts of half as many samples, and again until a part fits. The gradient is that of the whole
    batch, ``g = sum_i(n_i * g_i) / sum_i(n_i)``, where g_i is that of a part whose loss is the mean over n_i targets.
    Clipping, accumulation, schedules, averages, mixing and the GradScaler are those of the whole batch. A batch that
    is not larger than a part runs as without this trick, bit for bit. The size is in the checkpoint.

    What the failed attempt has done is undone: gradients (those of earlier batches of the window stay), random numbers,
    metrics, buffers and attributes of the module. What it has logged is dropped. A run that has run out of memory is
    thereby bit for bit the same as one that was cut from that step on. Values that the parts log become those of the
    batch, by their ``reduce_fx``; a metric object has seen every sample once.

    Targets are counted where the training step computes its loss from the targets of the batch, as by ``TokenMean``:
    losses of ``torch.nn.functional`` that are means, or a ``mean()`` of their losses of entries, and sums of such with
    factors. A function of a mean, as the root of ``mse_loss``, is refused. For any other loss pass ``count``.
    BatchNorm normalizes each part by itself, which a warning says.

    Under DDP all ranks cut when one of them has to: they exchange one number after the forward and after the backward
    pass, on the host. A rank that fails while gradients are averaged adds zeros for the rest, so that none waits for
    it, and all undo the pass.

    Args:
        minimum: The smallest number of samples of a part, at least 1.
        count: Function of the batch that returns the number of targets that its loss is the mean of, at least 0; None
            to count those of the loss.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, in manual optimization, for strategies that shard, and where ranks meet
            inside a step (SyncBatchNorm, ``all_gather``). When a batch has to be cut: if it cannot be, if the targets
            of the loss cannot be counted, or if the step does what cannot be undone.
        torch.OutOfMemoryError: If a part of ``minimum`` samples, or the optimizer's step, does not fit.

    Example:
        >>> trainer = L.Trainer(callbacks=[FitsMemory()], accelerator="cpu", logger=False)
    """

    conflicts = (
        Conflict(("SAMHooks",), "SAM runs a full batch twice", "Use SAM(micro_batch_size=...), or remove one of them"),
        Conflict(("GradCacheHooks",), "GradCacheMixin cuts every batch", "Choose a smaller chunk, remove FitsMemory"),
        Conflict(
            ("StepInBackward",), "a weight is stepped by the gradient of one part, before the others have added theirs"
        ),
        Conflict(
            ("HiddenMixup", "LabelErrors"),
            "the samples of a full batch are mixed or compared inside the step, which may run for parts of it",
        ),
        Conflict(
            ("HardExampleFilter",),
            "the samples of a full batch are compared, but a step may run for parts of it",
            'Remove one of them, or use mode="prune"',
            lambda trick, other: other.mode == "loss",
        ),
        Conflict(
            ("TokenMean",),
            "both weigh a part of a batch by its targets",
            "Use smaller batches and more of them in accumulate_grad_batches, or remove TokenMean",
        ),
        Conflict(
            ("Distill",),
            "a part counts as the targets of its loss, and the distance to the teacher is a mean over others",
            "Pass count=, or remove one of them",
            lambda trick, other: trick.count is None,
        ),
        Conflict(("static_graph",), "DDP's static graph allows no second run of a step", "Remove static_graph"),
    )

    def __init__(self, *, minimum: int = 1, count: Count | None = None) -> None:
        check_count("minimum", minimum)
        if count is not None and not callable(count):
            raise TypeError(f"count must be a function of the batch or None, got {count!r}.")
        super().__init__()
        self.minimum, self.count = minimum, count
        self.size: int | None = None  # the largest number of samples of a part; None as long as whole batches fit
        self._trainer: Any = None
        self._attempts: Any = None  # those of the fit
        self._parts: Any = None  # what runs the steps of the fit, whole or in parts
        self._forget()

    def _forget(self) -> None:
        self._trainer = self._attempts = self._parts = None
        self._pending: tuple[Step, Forward] | None = None  # what waits for its backward pass
        self._stepping = False  # whether the optimizer has its gradients

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        _check(trainer, pl_module)
        self.size, self._trainer = None, trainer
        self._undo.callback(self._forget)
        self._attempts = Attempts(trainer, self._undo, self._shrink)
        self._parts = StepInParts(trainer, self.count)
        if trainer.world_size > 1:
            self._wrap(pl_module, "all_gather", self._all_gather)
        self._wrap(trainer.strategy, "training_step", self._training_step)
        self._wrap(trainer.strategy, "optimizer_step", self._optimizer_step)
        self._wrap(pl_module, "backward", self._backward)
        self._wrap(pl_module, "log", self._log)

    # -- the hooks of a step ------------------------------------------------------------------------------------------

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step, in parts if need be; the last part is left without its backward pass."""
        self._pending = None
        if not torch.is_grad_enabled():  # a trial, or statistics that are read anew
            return original(*args, **kwargs)
        module = self._trainer.lightning_module
        step = self._attempts.begin(partial(original, *args, **kwargs))
        forward = self._attempts.until_it_fits(step, partial(self._forward, step, first=True))
        for call in forward.logs:
            module.log(call.pop("name"), call.pop("value"), **call)
        if forward.loss is not None:
            if _runs_before_backward(self._trainer):
                state = ModuleState(module, deep=True, compared=True)  # hooks are not watched
                step.after_forward = Start(state, random_state(module.device), module.device)
            self._pending = step, forward
        return forward.output

    def _forward(self, step: Step, *, first: bool) -> Forward:
        """Run the forward pass of a step, and of its parts all but the last backward pass.

        Args:
            step: The step.
            first: Whether Lightning has yet to set gradients to zero, if the batch is the first of a window.
        """
        begins = first and self._trainer.fit_loop.batch_idx % self._trainer.accumulate_grad_batches == 0
        if begins and self._parts.cuts(step.run, self.size) and not _sees_zero_grad(self._trainer):
            self._trainer.optimizers[0].zero_grad()  # as Lightning will, before memory is needed for the parts'
        return self._parts.run(step.run, self.size)

    def _backward(self, original: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradient of the batch to ``.grad``; ``loss`` has its value alone, so that others hold no graph."""
        if self._pending is None:  # a part, whose other parts follow
            original(loss, *args, **kwargs)
            return
        (step, forward), self._pending = self._pending, None
        module = self._trainer.lightning_module

        def backward(loss: Tensor) -> None:
            original(loss, *args, **kwargs)

        changed, step.after_forward = step.after_forward and _changed(step.after_forward, module), None
        while True:
            before = GradientsBefore(trained_weights(module))
            if self._attempts.attempt(step, partial(descend, self._trainer, forward, before, backward)):
                return
            if changed:
                raise MisconfigurationException(
                    f"FitsMemory sets the module back when memory has run out in a backward pass, and {changed} is"
                    " changed by a hook before it (on_before_zero_grad, on_before_backward): change it in"
                    " on_train_batch_start or on_train_batch_end."
                )
            before.restore()
            with replaying():
                forward = self._attempts.until_it_fits(step, partial(self._forward, step, first=False))

    def _optimizer_step(
        self, original: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step, and say of an error that no smaller batch can help."""

        def with_gradients() -> Any:
            self._stepping = False
            result = closure()
            self._stepping = True
            return result

        try:
            return original(optimizer, with_gradients, *args, **kwargs)
        except Exception as error:
            if not (self._stepping and out_of_memory(error)):
                raise
            raise torch.OutOfMemoryError(
                f"FitsMemory: memory ran out in the step of {type(optimizer).__name__}, which needs as much for a batch"
                " of any size. Use an 8-bit optimizer, LoRA, StepInBackward or a sharded strategy (suggest_strategy)."
            ) from error
        finally:
            self._stepping = False

    def _log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Keep what a step logs until it has fitted."""
        if is_replaying():
            return
        if self._parts.logs is None:
            original(*args, **kwargs)
            return
        call = {**dict(zip(_LOG, args, strict=False)), **kwargs}
        if isinstance(value := call["value"], Tensor):
            call["value"] = plain_tensor(value).detach().clone()  # the step may write into it
        self._parts.logs.append(call)

    def _all_gather(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gather outside of a step, where no rank can have run out of memory."""
        if self._parts.logs is None:
            return original(*args, **kwargs)
        raise MisconfigurationException(
            "FitsMemory cannot work with all_gather in training_step, where ranks would wait for one that has run out"
            f" of memory. {PASS_COUNT}"
        )

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if (size := self.size) is not None:
            log_every_n_steps(trainer, lambda: {"tricks/micro_batch_size": float(size)})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.size = state_dict["size"]

    def _shrink(self, step: Step, failed: Exception | None) -> None:
        """Halve the size of the parts, on all ranks."""
        samples = self._attempts.largest(count_samples(step.run.args[0], "FitsMemory"))
        tried = min(self.size or samples, samples)
        if tried <= self.minimum:
            raise torch.OutOfMemoryError(
                f"FitsMemory(minimum={self.minimum}): {'another rank' if failed is None else 'this rank'} ran out of"
                f" memory with {tried} of the {samples} samples of a batch, and no smaller part is allowed. Recompute"
                " activations (ActivationCheckpointing), use a preset of 16 bits or a sharded one, or a lower minimum."
            ) from failed
        self.size = max(self.minimum, (tried + 1) // 2)
        norms = sum(isinstance(m, _BatchNorm) and m.training for m in self._trainer.lightning_module.modules())
        rank_zero_warn(
            f"FitsMemory: a {'batch' if tried == samples else 'part'} of {tried} samples did not fit into memory:"
            f" training goes on in parts of {self.size}."
            + (f" {norms} BatchNorm layers normalize each part by itself, as in smaller batches." if norms else "")
        )


def _sees_zero_grad(trainer: L.Trainer) -> bool:
    """Whether code of the user's runs when gradients are set to zero, which it may look at or keep."""
    module = trainer.lightning_module
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden("on_before_zero_grad", callback, Callback) for callback in callbacks_of(trainer, Callback)
    )


def _changed(before: Start, module: L.LightningModule) -> str | None:
    """What is not as it was in the training step, but for the name of the hook that runs."""
    if generator := drawn_since(before.random, before.device):
        return f"the random generator of {generator}"
    name = module._current_fx_name
    module._current_fx_name = "training_step"
    try:
        return before.state.changed()
    finally:
        module._current_fx_name = name


def _runs_before_backward(trainer: L.Trainer) -> bool:
    """Whether code of the user's runs between forward and backward pass, which may change the module."""
    callbacks = [callback for callback in callbacks_of(trainer, Callback) if not isinstance(callback, Trick)]
    hooks = ("on_before_zero_grad", "on_before_backward")
    return any(is_overridden(hook, trainer.lightning_module) for hook in (*hooks, "optimizer_zero_grad")) or any(
        is_overridden(hook, callback, Callback) for hook in hooks for callback in callbacks
    )


def _check(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise for what cannot be cut, or where ranks wait for one another inside a step."""
    name = type(module).__name__
    why = "where no rank waits for another inside a step"
    require_engine(trainer, "FitsMemory", *UNSHARDED, why=why)
    if not module.automatic_optimization:
        rule = f"runs a step again in automatic optimization, got {name} with automatic_optimization=False"
        remedy = "Cut the batch in training_step"
    elif takes_dataloader_iter(module):
        rule, remedy = f"needs the batch, got {name}.training_step(dataloader_iter)", "Take the batch as the argument"
    elif has_comm_state(trainer):
        rule = f"undoes averages of gradients, got {type(trainer.strategy).__name__} with a communication hook that"
        rule, remedy = f"{rule} has a state (PowerSGD, local SGD)", "Leave the hook out"
    elif trainer.world_size > 1 and any(getattr(layer, "sparse", False) for layer in module.modules()):
        rule, remedy = f"averages dense gradients, got a layer of {name} with sparse=True", "Leave that out"
    elif trainer.world_size > 1 and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        rule, remedy = f"lets no ranks meet inside a step, got SyncBatchNorm in {name}", "Leave out sync_batchnorm"
    elif trainer.world_size > 1 and any(getattr(layer, "dist_sync_on_step", False) for layer in module.modules()):
        rule = f"lets no ranks meet inside a step, got a metric with dist_sync_on_step=True in {name}"
        remedy = "Leave that out"
    else:
        return
    raise MisconfigurationException(f"FitsMemory {rule}. {remedy}, or remove FitsMemory.")
