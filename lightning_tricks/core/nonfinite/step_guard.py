"""Optimizer steps that are left out, with weights, schedules, ``global_step`` and buffers as before the window."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS

from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import grad_scaler, has_comm_state, subtract_steps
from lightning_tricks.core.replay.data_watch import data_of, restore_data, watching_data
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.core.weights.tensors import bits, local_part

STEPS_LEFT_OUT = (
    Conflict(
        ("SpikeDetection",),
        "SpikeDetection sees the losses of skipped steps and stops training",
        "Remove SpikeDetection",
    ),
    Conflict(
        ("detect_anomaly",),
        "the backward pass raises at the first NaN, before the step can be skipped",
        "Turn detect_anomaly off once the cause is found",
        warns=True,
    ),
)


class SkipStep(Exception):
    """Raised in ``on_before_optimizer_step`` to leave the optimizer before it changes anything."""


def require_skippable_steps(trainer: L.Trainer, trick: str) -> None:
    """Raise at setup under a strategy where steps cannot be left out.

    Raises:
        MisconfigurationException: Under DeepSpeed, and with a communication hook that keeps gradients.
    """
    strategy = trainer.strategy
    if engine_of(trainer).is_deepspeed:
        why = "which makes the steps itself (and skips such steps in fp16): use another strategy"
    elif has_comm_state(trainer) and getattr(strategy, "compression", "") != "local_sgd":
        why = "whose communication hook (PowerSGD) keeps values that are not finite: use another compression"
    else:
        return
    raise MisconfigurationException(
        f"{trick} cannot skip steps under {type(strategy).__name__}, {why}, or remove {trick}."
    )


class Buffers:
    """Copies of a module's buffers, such as BatchNorm statistics, on their device or on ``device``.

    Those in host memory are complete when the device has done what it was given before (``core.device.reached``).
    """

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        modules, seen = [module], {module}
        for owner in modules:  # the list grows in the loop; modules() takes three times longer in a small network
            for child in owner._modules.values():
                if child is not None and child not in seen:
                    modules.append(child)
                    seen.add(child)
        self._owners = [(owner._buffers, dict(owner._buffers)) for owner in modules]
        found = {id(buffer): buffer for _, named in self._owners for buffer in named.values() if buffer is not None}
        self._copies = [
            (buffer, local_part(buffer).to(device or buffer.device, copy=True, non_blocking=True))
            for buffer in found.values()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers: the same tensors with the same values, also where they were replaced."""
        for now, named in self._owners:
            for name in [name for name, _ in now.items() if name not in named]:
                del now[name]
            for name, buffer in named.items():
                if name not in now or now[name] is not buffer:  # the dictionaries of TorchScript have no get()
                    now[name] = buffer
        for buffer, copied in self._copies:
            if _writable(buffer):
                local_part(buffer).copy_(copied, non_blocking=True)


def _writable(tensor: Tensor) -> bool:
    """Whether a tensor can be written to; torch refuses expanded tensors."""
    if tensor.layout != torch.strided:
        return True
    return all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def starts_window(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether an accumulation window begins with this batch; unknown, so False, in manual optimization."""
    return trainer.lightning_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0


class OwnWrites:
    """The weights that training steps write by themselves, such as a momentum encoder's, kept from before a window.

    Those that are written by their ``.data`` are copied when a step takes it. Others are found after they were written
    for the first time, and are copied before every window from then on.

    Args:
        module: The module in a fit.
    """

    def __init__(self, module: nn.Module) -> None:
        FSDP2(module).reshard()  # so that the module's parameters are the optimizer's
        self._weights = {
            name: weight
            for name, weight in module.named_parameters()
            if not (is_lazy(weight) or weight.is_inference() or hasattr(weight, "ds_id"))  # ZeRO-3 moves weights
        }
        self._ids = {id(weight) for weight in self._weights.values()}
        self._known: dict[int, Tensor] = {}  # the weights that steps were seen to write
        self._copies: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # weights, their memory and what they held
        self._lost: list[str] = []  # names of weights that were written in this window, and not copied

    def begin_window(self) -> None:
        """Call this before the first training step of a window."""
        self._copies, self._lost = {}, []
        for weight in self._known.values():
            self._copy(weight)

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step."""
        versions = [weight._version for weight in self._weights.values()]
        with watching_data(dict.fromkeys(self._ids), self._copy):
            output = original(*args, **kwargs)
        for (name, weight), version in zip(self._weights.items(), versions, strict=True):
            if weight._version != version and id(weight) not in self._copies:
                self._lost.append(name)
                self._known[id(weight)] = weight
        return output

    def _copy(self, weight: Tensor) -> None:
        if id(weight) not in self._copies:
            self._copies[id(weight)] = weight, data_of(weight), bits(weight).clone()

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Restore the weights from before the window; returns the names of those that were not copied before it."""
        for weight, data, contents in self._copies.values():
            restore_data(weight, data, contents)
        return self._lost


class Window:
    """A snapshot of the buffers, and of weights that training steps write, before an optimizer step's first batch."""

    def __init__(self) -> None:
        self._buffers: Buffers | None = None
        self._writes: OwnWrites | None = None

    def start(self, trainer: L.Trainer, module: L.LightningModule, undo: ExitStack) -> None:
        """Look at training steps until ``undo`` is closed; those that step optimizers themselves are left out."""
        if module.automatic_optimization:
            self._writes = OwnWrites(module)
            undo.callback(wrap_method(trainer.strategy, "training_step", self._writes.step))

    def begin_batch(self, trainer: L.Trainer, module: nn.Module, batch_idx: int) -> None:
        """Call this before the training step of a batch."""
        if self._buffers is None or starts_window(trainer, batch_idx):
            self._buffers = Buffers(module)
            if self._writes is not None:
                self._writes.begin_window()

    def end(self, module: L.LightningModule) -> None:
        """Call this before an optimizer step that is not left out."""
        if not module.automatic_optimization:
            self._buffers = Buffers(module)  # the next window may begin in the same batch

    def restore(self) -> list[str]:
        """Restore buffers and weights, for a new window; returns the names of weights that could not be restored."""
        assert self._buffers is not None, "copied when the batch began"
        self._buffers.restore()
        return [] if self._writes is None else self._writes.restore()


class StepGuard:
    """Catches ``SkipStep``, and undoes what Lightning does for a step that it believes was made.

    Schedules that count steps wait, ``global_step`` stays, and the optimizer's own hooks, by which averages notice a
    step, do not run.
    """

    def __init__(self) -> None:
        self._trainer: Any = None  # the Trainer whose steps are guarded
        self._left_out = False  # whether a step of this batch was left out
        self._counted = 0  # number of left-out steps that global_step still counts

    def start(self, trainer: L.Trainer, trick: str, undo: ExitStack) -> None:
        """Guard the optimizer steps of this fit until ``undo`` is closed.

        Raises:
            MisconfigurationException: With LBFGS.
        """
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise MisconfigurationException(
                f"{trick} cannot skip a step of LBFGS, which changes the weights before it calls its closure: use"
                f" another optimizer, or remove {trick}."
            )
        self._trainer = trainer
        self._left_out, self._counted = False, 0
        undo.callback(setattr, self, "_trainer", None)
        undo.callback(wrap_method(trainer.strategy, "optimizer_step", self._step))
        undo.callback(wrap_method(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._schedule))

    def begin_batch(self) -> None:
        """Call this before the training step of a batch."""
        self._left_out = False

    def _step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(optimizer, *args, **kwargs)
        except SkipStep:
            self._left_out = True
            self._counted += 1
            scaler = grad_scaler(self._trainer)
            if scaler is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
                # A GradScaler requires update() after unscaling, which would count a step that was not made.
                state = scaler.state_dict()
                scaler.update()
                scaler.load_state_dict(state)
            return None

    def _schedule(self, original: Callable[..., None], interval: str, *args: Any, **kwargs: Any) -> None:
        if self._counted:  # Lightning counts a step once optimizer_step has returned, which is too late to say no
            subtract_steps(self._trainer, self._counted)
            self._counted = 0
        if not (self._left_out and interval == "step"):
            original(interval, *args, **kwargs)
