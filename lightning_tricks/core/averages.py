"""Averages of a module's weights, and their place: in the module, beside it, in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks.core.weights import Swap, copies, copy_, lerp_

Which = Literal["averaged", "raw"]


class Averages:
    """Averages by parameter (or buffer) name, at least fp32, and which weights the module holds at the moment.

    Until the first update the averaged weights *are* the raw weights, whatever the averages say.

    Args:
        module: The module whose weights are averaged.
        device: Where the averages live; None for beside the weights.
    """

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        self.module = module
        self.device = device
        self.updates = 0
        self.tensors: dict[str, Tensor] = {}
        self._parameters: list[Tensor] | None = None
        self._swap = Swap()

    def weights(self) -> list[Tensor]:
        """The tensors of the module that have an average, in the order of the averages."""
        named = _named(self.module)
        return [named[name] for name in self.tensors]

    def track(self, chosen: Mapping[str, Tensor]) -> None:
        """Start an average, a copy, for each chosen weight that has none; move all to where they belong."""
        new = {name: weight for name, weight in chosen.items() if name not in self.tensors}
        self.tensors.update(zip(new, copies(list(new.values())), strict=True))
        weights = self.weights()
        for (name, average), weight in zip(list(self.tensors.items()), weights, strict=True):
            self.tensors[name] = average.to(self.device or weight.device)
        # a parameter stays the same object while training, a buffer may be assigned anew at any step
        self._parameters = weights if all(isinstance(weight, nn.Parameter) for weight in weights) else None

    def lerp(self, fraction: float) -> None:
        """Move every average by ``fraction`` of the way to its weight."""
        lerp_(list(self.tensors.values()), self._parameters or self.weights(), fraction)
        self.updates += 1

    @property
    def holds(self) -> Which:
        """Which weights the module holds."""
        return "raw" if self._swap.aside is None else "averaged"

    def show(self, which: Which) -> None:
        """Put the averaged or the raw weights into the module."""
        if which == "averaged" and self.holds == "raw" and self.updates:
            self._swap.put(self.weights(), list(self.tensors.values()))
        elif which == "raw":
            self._swap.back(self.weights())

    def untouched(self) -> bool:
        """Whether averaged weights that the module holds are still those that were put there."""
        pairs = zip(self.weights(), self.tensors.values(), strict=True)
        return self.holds == "raw" or all(torch.equal(w, a.to(w.device, w.dtype)) for w, a in pairs)

    def state_dict_with(self, which: Which, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``state_dict()`` gives while the module holds the averaged or the raw weights.

        They are put into the module for the call, so whatever ``state_dict`` renames, copies, ties or leaves out is
        right. What it gives is live where the module holds those weights anyway, otherwise copies in host memory.
        """
        before = self.holds
        self.show(which)
        try:
            state = state_dict()
            if self.holds != before:
                state = {n: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for n, v in state.items()}
        finally:
            self.show(before)
        return state

    def state_dict(self, saved: Which) -> dict[str, Any]:
        """What a checkpoint whose ``state_dict`` has the ``saved`` weights needs besides to restore both exactly."""
        weights = self.weights()
        if saved == "raw" or not self.updates:
            return {"updates": self.updates, "raw": {}, "averaged": dict(self.tensors)}
        raw = [w.detach() for w in weights] if self._swap.aside is None else self._swap.aside
        rounded = {n: a for (n, a), w in zip(self.tensors.items(), weights, strict=True) if a.dtype != w.dtype}
        return {
            "updates": self.updates,
            "raw": dict(zip(self.tensors, raw, strict=True)),
            "averaged": rounded,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Take up what ``state_dict`` gave, after the checkpoint's ``state_dict`` went into the module.

        Raises:
            KeyError: If ``strict`` and the checkpoint averaged weights that the module does not have.
        """
        named = _named(self.module)
        names = {**state["raw"], **state["averaged"]}
        if strict and (unknown := sorted(names.keys() - named.keys())):
            raise KeyError(
                f"The checkpoint has averages of weights that {type(self.module).__name__} does not have:"
                f" {', '.join(unknown)}. Load it into the module it was made with, or set strict_loading=False."
            )
        self.updates = state["updates"]
        for name in [name for name in names if name in named]:
            average = state["averaged"].get(name)
            self.tensors[name] = copies([named[name]])[0] if average is None else average
            if name in state["raw"]:
                copy_([named[name]], [state["raw"][name]])


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
