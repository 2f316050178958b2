"""A snapshot of a fit in host memory: weights, optimizers, schedules, averages and random numbers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_tricks.core.averaging.coordinator import Averaging
from lightning_tricks.core.device import reached
from lightning_tricks.core.lightning.trainer import callbacks_of, grad_scaler, subtract_steps
from lightning_tricks.core.nonfinite.step_guard import Buffers
from lightning_tricks.core.random_numbers import random_state, set_random_state
from lightning_tricks.core.weights.by_engine import local_weights
from lightning_tricks.core.weights.tensors import local_part


class Snapshot:
    """The state of a fit between two optimizer steps, of this rank's shards; nothing is gathered."""

    @torch.no_grad()
    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
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
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._stateful = [
            (stateful, copy.deepcopy(stateful.state_dict())) for stateful in (*schedulers, *_scalers(trainer))
        ]
        self._random = random_state(module.device)
        self._wait = reached(module.device)  # the device writes the copies while the host goes on

    @torch.no_grad()
    def restore(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
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


def _scalers(trainer: pl.Trainer) -> list[Any]:
    scaler = grad_scaler(trainer)
    return [] if scaler is None else [scaler]


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
