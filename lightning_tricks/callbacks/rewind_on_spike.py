"""Training goes back to a snapshot when the loss spikes, and leaves the bad batches out."""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from lightning_tricks.core.averaging.coordinator import Averaging
from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.device import reached
from lightning_tricks.core.lightning.trainer import (
    callbacks_of,
    grad_scaler,
    is_fitting,
    log_every_n_steps,
    subtract_steps,
)
from lightning_tricks.core.nonfinite.finite import FiniteCheck
from lightning_tricks.core.nonfinite.step_guard import (
    STEPS_LEFT_OUT,
    Buffers,
    SkipStep,
    StepGuard,
    require_skippable_steps,
    starts_window,
)
from lightning_tricks.core.random_numbers import random_state, set_random_state
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.by_engine import local_weights
from lightning_tricks.core.weights.stages import StagedCallback
from lightning_tricks.core.weights.tensors import local_part
from lightning_tricks.schedules.scaling import scaled_lrs

__all__ = ["RewindOnSpike"]


def is_spike(loss: float, before: Sequence[float], threshold: float) -> bool:
    """Whether ``loss > mean(before) + threshold * std(before)``, or it is not finite.

    Args:
        loss: The new loss.
        before: The losses before it, at least two.
        threshold: Number of standard deviations, at least 0.

    Example:
        >>> is_spike(2.5, [1.0, 1.1, 0.9, 1.0], threshold=6.0), is_spike(1.2, [1.0, 1.1, 0.9, 1.0], threshold=6.0)
        (True, False)
    """
    mean = statistics.fmean(before)
    std = math.dist(before, [mean] * len(before)) / math.sqrt(len(before) - 1)  # statistics.stdev is 30 times slower
    return not math.isfinite(loss) or loss > mean + threshold * std


@final
class RewindOnSpike(Trick):
    """Goes back to the last snapshot when ``loss > mean + threshold * std`` of the last steps, or is not finite.

    The loss of an optimizer step is the mean over its accumulated batches and all ranks. It is checked before the
    optimizer steps, after the first ``window`` steps; whether it and the gradients are finite is always checked.

    After a spike weights, buffers, optimizers, schedules, averages (``EMA``), random numbers and ``global_step`` are
    those of the snapshot, bit for bit. Training goes on with the next batches. The batches since the snapshot are left
    out, so training ends as many steps before the end of a schedule. Logged values stay, and so does the history of
    ``AutoClip``. Snapshots are in host memory, every rank's own shards only; the first one is taken when training
    starts.

    With a GradScaler (fp16) only the losses are checked, since it finds its scale by infinite gradients. ``rewinds`` is
    the number of rewinds so far, logged as ``tricks/rewinds``.

    Args:
        threshold: Number of standard deviations above the mean, at least 0.
        window: Number of optimizer steps for mean and deviation, at least 2.
        every_n_steps: Optimizer steps between snapshots, at least 1.
        max_rewinds: Number of rewinds after which a further spike stops training, at least 1.
        lr_factor: Factor of the learning rates in the ``lr_steps`` optimizer steps after a rewind, in [0, 1].
        lr_steps: Number of optimizer steps with that factor, at least 0.

    Raises:
        ValueError: For a value out of range.
        TypeError: For a value of the wrong type.
        MisconfigurationException: Under DeepSpeed, which makes the steps itself, with LBFGS, with PowerSGD, which keeps
            values that are not finite, and with manual optimization.
        FloatingPointError: At the first spike after ``max_rewinds`` rewinds; with the losses before it.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[RewindOnSpike(max_rewinds=3)], accelerator="cpu", logger=False)

    References:
        Khrushchev et al., YaLM 100B, 2022; Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1.
    """

    needs_step_hooks = True
    conflicts = (
        Conflict(
            ("WeightAveraging", "StochasticWeightAveraging"),
            "a rewind does not restore Lightning's averages, which keep the weights of the spike",
            "Use EMA or SWA of lightning_tricks, whose averages are restored with the weights",
        ),
        *STEPS_LEFT_OUT,
    )

    def __init__(
        self,
        threshold: float = 6.0,
        *,
        window: int = 100,
        every_n_steps: int = 100,
        max_rewinds: int = 5,
        lr_factor: float = 1.0,
        lr_steps: int = 0,
    ) -> None:
        check_range("threshold", threshold, 0.0)
        check_count("window", window, least=2)
        check_count("every_n_steps", every_n_steps)
        check_count("max_rewinds", max_rewinds)
        check_range("lr_factor", lr_factor, 0.0, 1.0)
        check_count("lr_steps", lr_steps, least=0)
        super().__init__()
        self.threshold = threshold
        self.window = window
        self.every_n_steps = every_n_steps
        self.max_rewinds = max_rewinds
        self.lr_factor = lr_factor
        self.lr_steps = lr_steps
        self.rewinds = 0
        self._losses: deque[float] = deque(maxlen=window)  # the losses of good steps
        self._slow_until = 0  # the step from which the learning rates are the schedule's again
        self._watch, self._guard = FiniteCheck(), StepGuard()
        self._parts: list[Tensor] = []  # the losses of the window's batches
        self._spiked = False  # whether the present step ends with a rewind
        self._snapshot: tuple[Snapshot, list[float]] | None = None  # the last snapshot, and the good losses before it

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        self.rewinds, self._slow_until = 0, 0
        self._losses.clear()
        require_skippable_steps(trainer, "RewindOnSpike")
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"RewindOnSpike cannot work with {type(pl_module).__name__}.automatic_optimization=False: step there"
                " only if the loss is good, or remove RewindOnSpike."
            )

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if lazy := [name for name, p in pl_module.named_parameters() if isinstance(p, nn.UninitializedParameter)]:
            raise MisconfigurationException(
                f"RewindOnSpike needs weights that exist when training begins, got {', '.join(lazy)} of lazy layers in"
                f" {type(pl_module).__name__}: pass a batch through the module before the fit."
            )
        self._watch, self._parts, self._spiked = FiniteCheck(), [], False
        self._undo.callback(setattr, self, "_snapshot", None)
        self._guard.start(trainer, "RewindOnSpike", self._undo)
        self._wrap(trainer.strategy, "optimizer_step", partial(self._step, trainer, pl_module))

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._guard.begin_batch()
        if starts_window(trainer, batch_idx):
            self._watch.forget()
            self._parts.clear()
        if self._snapshot is None or trainer.global_step >= self._snapshot[0].step + self.every_n_steps:
            for staged in callbacks_of(trainer, StagedCallback):  # type: ignore[type-abstract]
                # A layer that stops at this step has no state in the snapshot, also if its callback comes later.
                staged.on_train_batch_start(trainer, pl_module, batch, batch_idx)
            self._snapshot = None  # frees its memory for the next one
            self._snapshot = Snapshot(trainer, pl_module), list(self._losses)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._parts.append(self._watch.note(trainer, loss))

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not self._parts:  # training_step returned None
            return
        mean = torch.stack(self._parts).mean()
        self._parts.clear()
        scaled = grad_scaler(trainer) is not None
        finite, (loss,) = self._watch.finite_and_mean(trainer, [] if scaled else [optimizer], [mean])
        full = len(self._losses) == self.window
        if finite and not (full and is_spike(loss, self._losses, self.threshold)):
            self._losses.append(loss)
            return
        if self.rewinds == self.max_rewinds:
            before = ", ".join(f"{loss:.4g}" for loss in list(self._losses)[-5:]) or "none"
            raise FloatingPointError(
                f"RewindOnSpike has gone back max_rewinds={self.max_rewinds} times, and the loss is {loss:.4g} after"
                f" step {trainer.global_step} again (good losses before it: {before}). Lower the learning rate, clip"
                " gradients, or check the data."
            )
        self._spiked = True
        raise SkipStep

    def _step(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        original: Callable[..., Any],
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        slow = trainer.global_step < self._slow_until
        with scaled_lrs(optimizer, self.lr_factor, "RewindOnSpike") if slow else nullcontext():
            result = original(optimizer, *args, **kwargs)
        if self._spiked:  # here, where wrappers of the step have undone their changes
            self._rewind(trainer, pl_module)
        return result

    def _rewind(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._snapshot is not None, "made when training started"
        self._spiked = False
        self.rewinds += 1
        trainer.callback_metrics["tricks/rewinds"] = torch.tensor(float(self.rewinds))
        snapshot, losses = self._snapshot
        snapshot.restore(trainer, pl_module)
        self._losses = deque(losses, maxlen=self.window)
        self._slow_until = snapshot.step + self.lr_steps

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        log_every_n_steps(trainer, lambda: {"tricks/rewinds": float(self.rewinds)})

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rewinds": self.rewinds, "losses": list(self._losses), "slow_until": self._slow_until}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rewinds, self._slow_until = state_dict["rewinds"], state_dict["slow_until"]
        self._losses = deque(state_dict["losses"], maxlen=self.window)


class Snapshot:
    """The state of a fit between two optimizer steps, of this rank's shards; nothing is gathered."""

    @torch.no_grad()
    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.step = trainer.global_step
        # Under FSDP2, validation leaves the root's weights gathered, in tensors that the next step frees.
        local_weights(trainer, module, "RewindOnSpike").reshard()
        self._weights = [(weight, _host(weight)) for weight in module.parameters()]
        self._places = [(owner._parameters, dict(owner._parameters)) for owner in module.modules()]
        self._buffers = Buffers(module, "cpu")
        self._optimizers = [
            ({weight: (state, _host_all(state)) for weight, state in optimizer.state.items()}, _settings(optimizer))
            for optimizer in trainer.optimizers
        ]
        self._averages = [
            partial(averages.restore, _host_all(averages.tensors), averages.steps, averages.updates, averages.tracks)
            for callback in callbacks_of(trainer, Averaging)  # type: ignore[type-abstract]
            for averages in callback.running().values()
        ]
        stateful = [*(config.scheduler for config in trainer.lr_scheduler_configs), grad_scaler(trainer)]
        self._stateful = [(one, copy.deepcopy(one.state_dict())) for one in stateful if one is not None]
        self._random = random_state(module.device)
        self._wait = reached(module.device)  # the device writes the copies while the host goes on

    @torch.no_grad()
    def restore(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Restore the snapshot; this can be repeated."""
        self._wait()
        for now, before in self._places:
            for name in before.keys() & now.keys():  # pruning moves a weight to another name, which it keeps
                if now[name] is not before[name] and not isinstance(before[name], DTensor):
                    now[name] = before[name]  # a step has made a new parameter
        for parameter, saved in self._weights:
            local_part(parameter).copy_(saved, non_blocking=True)
        self._buffers.restore()
        for optimizer, (states, groups) in zip(trainer.optimizers, self._optimizers, strict=True):
            for weight in [weight for weight in optimizer.state if weight not in states]:
                del optimizer.state[weight]
            for weight, (state, values) in states.items():
                _put(optimizer.state.setdefault(weight, state), values)  # a layer that has stopped since has none
            for group, settings in zip(optimizer.param_groups, copy.deepcopy(groups), strict=True):
                group.update(settings)
        for restore_averages in self._averages:
            restore_averages()
        for stateful, state in self._stateful:
            stateful.load_state_dict(copy.deepcopy(state))
        set_random_state(self._random, module.device)
        subtract_steps(trainer, trainer.global_step - self.step)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _host(tensor: Tensor) -> Tensor:
    tensor = local_part(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.to("cpu", copy=True, non_blocking=True)
    names, context = tensor.__tensor_flatten__()  # Its own to(copy=True) may share the tensors inside, as torchao's do.
    inside = {name: _host(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inside, context, tensor.size(), tensor.stride())


def _host_all(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _host(value) if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in values.items()}


def _put(values: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore a dictionary: tensors in place, other values as copies; new keys are removed."""
    for key in values.keys() - saved.keys():
        del values[key]
    for key, value in saved.items():
        if isinstance(value, Tensor):
            local_part(values[key]).copy_(value, non_blocking=True)
        else:
            values[key] = copy.deepcopy(value)
