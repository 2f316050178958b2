"""Optimizers whose states are objects, saved as plain tensors; apart from by_name, since only two need it.

A stock Trainer loads a checkpoint with a function as ``map_location`` and ``weights_only=True``. So torch loads neither
torchao's tensors of few bits nor GaLore's projectors.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

_MODULES = {
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "GaLoreProjector": "pytorch_optimizer.optimizer.utils.galore",
}
_KIND = "kind"  # the key that holds the name of the class


def with_plain_states(kind: type[Optimizer]) -> type[Optimizer]:
    """A subclass of an optimizer whose ``state_dict()`` holds tensors, numbers and strings only.

    Its ``load_state_dict`` reads that, and the states of ``kind`` itself as well.
    """
    return type(kind.__name__, (_PlainStates, kind), {"__module__": kind.__module__})


class _PlainStates(Optimizer):
    @override
    def state_dict(self) -> dict[str, Any]:
        whole = super().state_dict()
        return {**whole, "state": {number: _encoded(state) for number, state in whole["state"].items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Not by hooks: pytorch_optimizer compares what torch has loaded with the dictionary that it was given.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        devices = {number: weight.device for number, weight in zip(numbers, weights, strict=False)}
        states = {number: _decoded(state, devices.get(number)) for number, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": states})


def _encoded(state: dict[str, Any]) -> dict[str, Any]:
    """The states of a weight, with a dictionary in the place of each object of the known classes."""
    return {key: _plain(value) if type(value).__name__ in _MODULES else value for key, value in state.items()}


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        tensors = {name: getattr(value, name) for name in names}
        return {_KIND: type(value).__name__, "tensors": tensors, "context": context}
    return {_KIND: type(value).__name__, "attributes": dict(vars(value))}


def _decoded(state: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """The states of a weight as ``_encoded`` was given them, with the tensors of objects on the weight's device."""
    return {
        key: _made(value, device) if isinstance(value, dict) and value.get(_KIND) in _MODULES else value
        for key, value in state.items()
    }


def _made(plain: dict[str, Any], device: torch.device | None) -> Any:
    kind = getattr(importlib.import_module(_MODULES[plain[_KIND]]), plain[_KIND])
    plain = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), plain)
    if "tensors" in plain:
        return kind.__tensor_unflatten__(plain["tensors"], plain["context"], None, None)
    made = kind()
    vars(made).update(plain["attributes"])
    return made
