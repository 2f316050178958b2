"""Optimizer steps left out: weights, schedules, ``global_step`` and buffers as if the window had not been."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import LBFGS

from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import grad_scaler, has_comm_state, subtract_steps
from lightning_tricks.core.trick import Conflict
from lightning_tricks.core.weights.tensors import local_part

STEPS_LEFT_OUT = (
    Conflict(
        ("SpikeDetection",),
        "the losses of steps that are left out reach it all the same, and it ends the training",
        "Leave SpikeDetection out",
    ),
    Conflict(
        ("detect_anomaly",),
        "the backward pass raises at the first NaN, before the step can be left out",
        "Leave detect_anomaly out when the cause is found",
        warns=True,
    ),
)


class SkipStep(Exception):
    """Raised in ``on_before_optimizer_step``: the optimizer is left before it changes anything."""


def require_skippable_steps(trainer: pl.Trainer, trick: str) -> None:
    """Raise at setup where no step can be left out.

    Raises:
        MisconfigurationException: Under such a strategy.
    """
    strategy = trainer.strategy
    if engine_of(trainer).is_deepspeed:
        why = "which steps by itself (in fp16 it leaves out such steps): use another strategy"
    elif has_comm_state(trainer) and getattr(strategy, "compression", "") != "local_sgd":
        why = "whose communication hook (PowerSGD) keeps what is not finite for later steps: use another compression"
    else:
        return
    raise MisconfigurationException(
        f"{trick} cannot leave out steps under {type(strategy).__name__}, {why}, or leave {trick} out."
    )


class Buffers:
    """The buffers of a module (the statistics of BatchNorm) as they are now, beside them or on ``device``."""

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        modules, seen = [module], {module}
        for each in modules:  # grows: in a small network modules() takes three times longer
            for child in each._modules.values():
                if child is not None and child not in seen:
                    modules.append(child)
                    seen.add(child)
        self._owners = [(owner._buffers, dict(owner._buffers)) for owner in modules]
        found = {id(each): each for _, named in self._owners for each in named.values() if each is not None}
        self._copies = [(each, local_part(each).to(device or each.device, copy=True)) for each in found.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the module the same tensors, where others have taken their places, with the values they had."""
        for now, named in self._owners:
            for name in [name for name, _ in now.items() if name not in named]:
                del now[name]
            for name, buffer in named.items():
                if name not in now or now[name] is not buffer:  # TorchScript's have no get()
                    now[name] = buffer
        for buffer, copied in self._copies:
            if _writable(buffer):
                local_part(buffer).copy_(copied)


def _writable(tensor: Tensor) -> bool:
    """Whether anybody can have written into it: torch refuses expanded tensors."""
    if tensor.layout != torch.strided:
        return True
    return all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def starts_window(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether gradients are accumulated anew from this batch on; who optimizes by hand does not tell."""
    return trainer.lightning_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0


class Window:
    """The buffers of a module as they were before the batches of an optimizer step."""

    def __init__(self) -> None:
        self._buffers: Buffers | None = None

    def begin_batch(self, trainer: pl.Trainer, module: nn.Module, batch_idx: int) -> None:
        """Call it before a batch's training step."""
        if self._buffers is None or starts_window(trainer, batch_idx):
            self._buffers = Buffers(module)

    def end(self, module: pl.LightningModule) -> None:
        """Call it before an optimizer step that is made."""
        if not module.automatic_optimization:
            self._buffers = Buffers(module)  # the next window may begin in the same batch

    def restore(self) -> None:
        """Give the buffers back their values; the window begins anew."""
        assert self._buffers is not None, "held since the batch began"
        self._buffers.restore()


class StepGuard:
    """Catches ``SkipStep``, and takes back what Lightning does for a step that it believes was made.

    The schedules that go by steps wait, ``global_step`` does not move, and the optimizer's own hooks, by which averages
    know of a step, do not run.
    """

    def __init__(self) -> None:
        self._trainer: Any = None  # whose steps are guarded
        self._left_out = False  # whether a step of this batch was
        self._counted = 0  # steps left out that are still in global_step

    def start(self, trainer: pl.Trainer, trick: str, undo: ExitStack) -> None:
        """Guard the optimizer steps of this fit until ``undo`` is closed.

        Raises:
            MisconfigurationException: With LBFGS.
        """
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise MisconfigurationException(
                f"{trick} cannot leave out a step of LBFGS, which changes the weights before each of its closures: use"
                f" another optimizer, or leave {trick} out."
            )
        self._trainer = trainer
        self._left_out, self._counted = False, 0
        undo.callback(setattr, self, "_trainer", None)
        undo.callback(wrap_method(trainer.strategy, "optimizer_step", self._step))
        undo.callback(wrap_method(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._schedule))

    def begin_batch(self) -> None:
        """Call it before a batch's training step."""
        self._left_out = False

    def _step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(optimizer, *args, **kwargs)
        except SkipStep:
            self._left_out = True
            self._counted += 1
            scaler = grad_scaler(self._trainer)
            if scaler is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
                state = scaler.state_dict()
                scaler.update()  # which it waits for once it has unscaled the gradients
                scaler.load_state_dict(state)
            return None

    def _schedule(self, original: Callable[..., None], interval: str, *args: Any, **kwargs: Any) -> None:
        if self._counted:
            subtract_steps(self._trainer, self._counted)
            self._counted = 0
        if not (self._left_out and interval == "step"):
            original(interval, *args, **kwargs)
