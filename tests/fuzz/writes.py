"""Weights that a module writes by itself: those of a teacher, a momentum encoder, torch's average, or its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def _assigned(own: Any, other: Tensor) -> None:
    own.data = own.data * 0.5 + other.data * 0.5


def _sliced(own: Any, other: Tensor) -> None:
    own.data[...] = own.data * 0.5 + other.data * 0.5


def _in_place(own: Any, other: Tensor) -> None:
    with torch.no_grad():
        own.lerp_(other, 0.5)


def _copied_in_place(own: Any, other: Tensor) -> None:
    with torch.no_grad():
        own.copy_(own * 0.5 + other * 0.5)


def _detached(own: Any, other: Tensor) -> None:
    memory = own.detach()
    memory += 0.5 * (other.detach() - memory)


SPELLINGS: dict[str, Callable[[Any, Tensor], object]] = {  # of a weight, and what it goes half of the way to
    "assigned": _assigned,
    "operation": lambda own, other: own.data.lerp_(other.data, 0.5),
    "copied": lambda own, other: own.data.copy_(own.data * 0.5 + other.data * 0.5),
    "sliced": _sliced,
    "several": lambda own, other: torch._foreach_lerp_([own.data], [other.data], 0.5),
    "in place": _in_place,
    "copied in place": _copied_in_place,
    "detached": _detached,
}


class Owner:
    """What a module writes into: a copy of its last layer, whose distance from that one is a part of the loss."""

    name = "teacher_of_head"

    def make(self, module: Any) -> None:
        setattr(module, self.name, copy.deepcopy(module.layers[-1]))

    def follower(self, module: Any) -> nn.Module:
        return getattr(module, self.name)

    def followed(self, module: Any) -> nn.Module:
        return module.layers[-1]

    def pairs(self, module: Any) -> list[tuple[Any, Tensor]]:
        """Its weights, and what they follow."""
        return list(zip(self.follower(module).parameters(), self.followed(module).parameters(), strict=True))

    def term(self, module: Any, x: Tensor) -> Any:
        """What it adds to the loss."""
        return sum((own - other).square().mean() for own, other in self.pairs(module))


class InAList(Owner):
    """A teacher that nobody finds among the submodules."""

    name = "held"

    def make(self, module: Any) -> None:
        module.held = [copy.deepcopy(module.layers[-1])]

    def follower(self, module: Any) -> nn.Module:
        return module.held[0]


class Encoder(Owner):
    """A copy of the whole network, whose outputs the last bias is near to."""

    name = "encoder"

    def make(self, module: Any) -> None:
        module.encoder = copy.deepcopy(module.layers)

    def followed(self, module: Any) -> nn.Module:
        return module.layers

    def term(self, module: Any, x: Tensor) -> Any:
        return 0.1 * (module.layers[-1].bias - module.encoder(x).mean(0)).square().mean()


class Wrapper(Owner):
    """torch's own average of the last layer."""

    name = "average"

    def make(self, module: Any) -> None:
        module.average = AveragedModel(module.layers[-1])

    def follower(self, module: Any) -> nn.Module:
        return module.average.module


class Itself(Owner):
    """The last bias, which decays."""

    def make(self, module: Any) -> None:
        pass

    def pairs(self, module: Any) -> list[tuple[Any, Tensor]]:
        return [(module.layers[-1].bias, torch.zeros_like(module.layers[-1].bias))]

    def term(self, module: Any, x: Tensor) -> Any:
        return 0


OWNERS: dict[str, Owner] = {
    "teacher": Owner(),
    "teacher in a list": InAList(),
    "momentum encoder": Encoder(),
    "EMA wrapper": Wrapper(),
    "own weights": Itself(),
}
# Not here: between the forward and the backward pass, whose graph a write in place would spoil.
MOMENTS = ("step", "forward", "on_train_batch_start", "on_train_batch_end", "on_after_backward")


@dataclass(frozen=True)
class Write:
    """Weights that a module writes by itself.

    Args:
        owner: What is written, of ``OWNERS``.
        spelling: How, of ``SPELLINGS``; torch's average has its own way.
        moment: When, of ``MOMENTS``.
        trains: Whether the optimizer trains them, too.
        every: The number of optimizer steps of which one has a write.
    """

    owner: str
    spelling: str = "assigned"
    moment: str = "step"
    trains: bool = False
    every: int = 1

    def make(self, module: Any) -> None:
        """Set up what is written."""
        OWNERS[self.owner].make(module)
        if self.owner != "own weights":
            OWNERS[self.owner].follower(module).requires_grad_(self.trains)

    def change(self, module: Any) -> None:
        """Write, if the step has its turn."""
        if module.global_step % self.every == 0:
            if self.owner == "EMA wrapper":
                module.average.update_parameters(module.layers[-1])
                return
            for own, other in OWNERS[self.owner].pairs(module):
                SPELLINGS[self.spelling](own, other)

    def term(self, module: Any, x: Tensor) -> Any:
        """What it adds to the loss."""
        return OWNERS[self.owner].term(module, x)
