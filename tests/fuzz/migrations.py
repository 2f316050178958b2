"""Classes that have changed since they saved a checkpoint, and what makes their weights of it as it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Body = dict[str, Any]  # methods of a class
Super = L.LightningModule
OLD, NEW, SIDES = "former", "present", (5, 3)  # names of a part, and the shape of its weight, which nothing else has


class Transposed(nn.Module):
    """A linear layer that holds the transpose of its weight."""

    def __init__(self) -> None:
        super().__init__()
        drawn = _linear()
        self.weight, self.bias = nn.Parameter(drawn.weight.detach().T.contiguous()), drawn.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class Versioned(Transposed):
    """The same, which torch asks for the version of what is loaded."""

    _version = 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        _transpose(state, f"{prefix}weight")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(f"{OLD}.", f"{NEW}."): value for name, value in state.items()}


def _rename(state: dict[str, Any]) -> None:
    for name in [name for name in state if name.startswith(f"{OLD}.")]:
        state[name.replace(f"{OLD}.", f"{NEW}.")] = state.pop(name)


def _transpose(state: dict[str, Any], name: str) -> None:
    if state[name].shape == SIDES:
        state[name] = state[name].T.contiguous()


def _transpose_states(checkpoint: dict[str, Any]) -> None:
    for optimizer in checkpoint["optimizer_states"]:
        for states in optimizer.get("state", {}).values():
            for name, value in states.items():
                if isinstance(value, Tensor) and value.shape == SIDES:
                    states[name] = value.T.contiguous()


def _new_dict(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"] = _renamed(checkpoint["state_dict"])


def _same_dict(self: Any, checkpoint: dict[str, Any]) -> None:
    _rename(checkpoint["state_dict"])


def _load(self: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return Super.load_state_dict(self, _renamed(state), *args, **kwargs)


def _load_from(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    _rename(state)
    Super._load_from_state_dict(self, state, prefix, *rest)


def _reshape(self: Any, checkpoint: dict[str, Any]) -> None:
    _transpose(checkpoint["state_dict"], f"{OLD}.weight")
    _transpose_states(checkpoint)


def _states_alone(self: Any, checkpoint: dict[str, Any]) -> None:
    _transpose_states(checkpoint)


def _scale(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"][f"{OLD}.weight"] = checkpoint["state_dict"][f"{OLD}.weight"] * 2


def _scale_in_place(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"][f"{OLD}.weight"].mul_(2)


def _add(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"].setdefault("added", torch.ones(2))


def _drop(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"].pop("gone")


def _linear() -> nn.Linear:
    return nn.Linear(*SIDES[::-1])


@dataclass(frozen=True)
class Migration:
    """What a class has changed, and how it loads what it has saved before.

    Args:
        name: The new name of the part.
        kind: Its new class.
        body: The methods of the new class that do so.
        old: Set up in ``__init__`` of the old class.
        new: Set up in ``__init__`` of the new class.
        same: Whether the network computes what it did, so that a migrated run is one that was never migrated.
    """

    name: str = OLD
    kind: Callable[[], nn.Module] = _linear
    body: Body = field(default_factory=dict)
    old: Callable[[Any], object] = lambda module: None
    new: Callable[[Any], object] = lambda module: None
    same: bool = True

    def make(self, module: Any, is_old: bool) -> None:
        """Set up the part in a module of the old class, or of the new one."""
        setattr(module, OLD if is_old else self.name, (_linear if is_old else self.kind)())
        (self.old if is_old else self.new)(module)


def part_of(module: Any) -> Any:
    """The part, in an old or in a new class."""
    return getattr(module, OLD if hasattr(module, OLD) else NEW)


def _pre_hook(module: Any) -> None:
    module.register_load_state_dict_pre_hook(lambda module, state, *_: _rename(state))


def _buffer(name: str) -> Callable[[Any], object]:
    return lambda module: module.register_buffer(name, torch.zeros(2))


MIGRATIONS: dict[str, Migration] = {
    "renamed": Migration(NEW, body={"on_load_checkpoint": _new_dict}),
    "renamed in place": Migration(NEW, body={"on_load_checkpoint": _same_dict}),
    "renamed by a pre-hook": Migration(NEW, new=_pre_hook),
    "renamed by load_state_dict": Migration(NEW, body={"load_state_dict": _load}),
    "renamed by _load_from_state_dict": Migration(NEW, body={"_load_from_state_dict": _load_from}),
    "reshaped": Migration(kind=Transposed, body={"on_load_checkpoint": _reshape}),
    "reshaped by its version": Migration(kind=Versioned, body={"on_load_checkpoint": _states_alone}),
    "scaled": Migration(body={"on_load_checkpoint": _scale}, same=False),
    "scaled in place": Migration(body={"on_load_checkpoint": _scale_in_place}, same=False),
    "with another buffer": Migration(body={"on_load_checkpoint": _add}, new=_buffer("added")),
    "without a buffer": Migration(body={"on_load_checkpoint": _drop}, old=_buffer("gone")),
}
