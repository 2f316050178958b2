"""Other classes of a project's module, made of its own, and batches with other values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tests.clients.base import Kind

Step = Callable[[Any, Callable[[Any], Tensor], Any, int], Any]


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def stepping(step: Step, **attributes: Any) -> Callable[[Kind], Kind]:
    """Subclasses whose ``training_step`` is ``step(module, the project's own, batch, number)``.

    The project's own draws the same random numbers each time that a step calls it.
    """

    def of(kind: Kind) -> Kind:
        own, count = kind.training_step, iter(range(10**9))

        @wraps(own)  # by whose signature Lightning knows what to pass
        def training_step(self: Any, batch: Any, *rest: Any) -> Any:
            state = torch.get_rng_state()

            def plain(other: Any) -> Tensor:
                torch.set_rng_state(state)
                return loss_of(own(self, other, *rest))

            return step(self, plain, batch, next(count))

        return type(kind.__name__, (kind,), {"training_step": training_step, **attributes})

    return of


def in_parts(cut: Callable[[Any], list[Any]]) -> Callable[[Kind], Kind]:
    """Subclasses whose loss is the mean of the project's own of each part of a batch, one after the other."""

    def of(kind: Kind) -> Kind:
        own = kind.training_step

        @wraps(own)
        def training_step(self: Any, batch: Any, *rest: Any) -> Any:
            return torch.stack([loss_of(own(self, part, *rest)) for part in cut(batch)]).mean()

        return type(kind.__name__, (kind,), {"training_step": training_step})

    return of


def naive_sam(rho: float, losses: list[float]) -> Callable[[Kind], Kind]:
    """The gradient at ``w + rho * g / ||g||``, with the project's own training step and nothing of ours.

    Notes the losses at w, which is what is trained on as far as anyone sees.
    """

    def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
        trained = [p for p in module.parameters() if p.requires_grad]
        loss = plain(batch)
        losses.append(float(loss))
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        module.__dict__["_held"] = [(p, p.detach().clone()) for p in trained]
        norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
        with torch.no_grad():
            for p, g in zip(trained, gradients, strict=True):
                if g is not None:
                    p.add_(rho * g / norm)
        return plain(batch)

    @torch.no_grad()
    def on_after_backward(self: Any) -> None:
        for p, before in self.__dict__.pop("_held"):
            p.copy_(before)

    return stepping(step, on_after_backward=on_after_backward)


def poisoned(number: int) -> Callable[[Kind], Kind]:
    """The losses of one batch are not numbers, in manual optimization too."""

    def of(kind: Kind) -> Kind:
        def step(module: Any, plain: Any, batch: Any, at: int) -> Any:
            module.__dict__["_factor"] = math.nan if at == number else 1.0
            loss = plain(batch)
            return loss if loss is None else loss * module.__dict__["_factor"]

        def manual_backward(self: Any, loss: Tensor, *rest: Any, **named: Any) -> None:
            kind.manual_backward(self, loss * self.__dict__["_factor"], *rest, **named)

        return stepping(step, manual_backward=manual_backward)(kind)

    return of


# -- batches ----------------------------------------------------------------------------------------------------------


def get(batch: Any, path: str) -> Any:
    for key in path.split("."):
        batch = batch[key] if isinstance(batch, dict) or hasattr(batch, "keys") else _item(batch, key)
    return batch


def _item(batch: Any, key: str) -> Any:
    return batch[int(key)] if key.isdigit() else getattr(batch, key)


def put(batch: Any, path: str, value: Any) -> Any:
    """A batch with another value at a path."""
    key, _, rest = path.partition(".")
    value = put(get(batch, key), rest, value) if rest else value
    if isinstance(batch, dict):
        return {**batch, key: value}
    if hasattr(batch, "_replace"):
        return batch._replace(**{batch._fields[int(key)] if key.isdigit() else key: value})
    if not key.isdigit():
        batch = copy(batch)
        setattr(batch, key, value)
        return batch
    return type(batch)(value if number == int(key) else each for number, each in enumerate(batch))


def paths(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
