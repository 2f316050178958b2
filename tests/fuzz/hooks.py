"""The hooks that Lightning calls in a fit, of every name that its classes have, and what a user does in one."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import nn

# Of the loops of test and predict, and of loaders, which a fit is given; and two names of one hook of which one may be.
_NOT_OF_A_FIT = ("test", "predict", "dataloader", "configure_sharded_model")


def _hooks(*kinds: type) -> tuple[str, ...]:
    every = [name for kind in kinds for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return tuple(name for name in every if name[0] != "_" and not any(part in name for part in _NOT_OF_A_FIT))


_OF_THE_STEP = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "lr_scheduler_step")
_MAKERS = ("configure_callbacks", "configure_optimizers")
OF_THE_MODULE = (*_hooks(ModelHooks, DataHooks, CheckpointHooks), *_OF_THE_STEP, *_MAKERS)
OF_THE_DATA = (
    *(name for name in _hooks(L.LightningDataModule) if hasattr(DataHooks, name)),
    "state_dict",
    "on_exception",
)
BEFORE_STEPS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")
_WITH_A_GRAPH = ("on_before_zero_grad", "on_before_backward", "backward", "optimizer_zero_grad")  # of the forward pass


def _draws(module: Any) -> None:
    torch.rand(1), random.random(), np.random.rand()


def _draws_weights(module: Any) -> None:
    nn.init.normal_(module.layers[-1].bias)


def draw_weights(module: Any) -> None:
    """Give the last layer other weights, the same ones at every call."""
    for number, weight in enumerate(module.layers[-1].parameters()):
        weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))


def _draws_weights_once(module: Any) -> None:
    if module.global_step == 0:
        draw_weights(module)


def _assigns_weights(module: Any) -> None:
    module.layers[-1].bias.data = torch.randn_like(module.layers[-1].bias.data)


def _loads_weights(module: Any) -> None:
    state = {name: weight.detach().clone() for name, weight in module.layers[-1].state_dict().items()}
    module.layers[-1].load_state_dict({**state, "bias": torch.full_like(state["bias"], 0.3)})


ACTS: dict[str, Callable[[Any], None]] = {
    "draws": _draws,
    "draws weights": _draws_weights,
    "draws weights once": _draws_weights_once,
    "assigns weights": _assigns_weights,
    "loads weights": _loads_weights,
}


def acting(act: str, hook: str) -> str:
    """The name of a feature: a hook in which something is done."""
    return f"{hook} {act}"


def act_of(feature: str) -> tuple[str, str] | None:
    """The hook, and what is done in it; None for another feature."""
    hook, _, act = feature.partition(" ")
    return (hook, act) if act in ACTS else None


FEATURES = tuple(
    acting(act, hook) for hook in OF_THE_MODULE for act in ACTS if act == "draws" or hook not in _WITH_A_GRAPH
)


def after(kind: type, hook: str, act: Callable[[Any], None]) -> type:
    """A class that does something in a hook, and then what ``kind`` does."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        act(self)
        return getattr(kind, hook)(self, *args, **kwargs)

    return type(kind)("Net", (kind,), {hook: method})
