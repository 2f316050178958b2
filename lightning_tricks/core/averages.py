"""Averages of a module's weights, and their place: in the module, beside it, in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks.core.weights import copies, copy_, lerp_

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
        self.steps = 0
        self.updates = 0
        self.tensors: dict[str, Tensor] = {}
        self._aside: list[Tensor] | None = None  # the raw weights, while averaged ones are in their place
        self._left: list[tuple[int, str]] = []

    def weights(self) -> list[Tensor]:
        """The tensors of the module that have an average, in the order of the averages."""
        named = _named(self.module)
        if gone := [name for name in self.tensors if name not in named]:
            raise RuntimeError(f"{type(self.module).__name__} has lost weights that are averaged: {', '.join(gone)}.")
        return [named[name] for name in self.tensors]

    def track(self, chosen: Mapping[str, Tensor]) -> None:
        """Average the chosen weights, from a copy for those that have no average yet, and put all where they belong.

        Averages of other parameters (frozen meanwhile) stay, those of other buffers go.
        """
        for name in [name for name in dict(self.module.named_buffers()) if name not in chosen]:
            self.tensors.pop(name, None)
        new = {name: weight for name, weight in chosen.items() if name not in self.tensors}
        self.tensors.update(zip(new, copies(list(new.values())), strict=True))
        for (name, average), weight in zip(list(self.tensors.items()), self.weights(), strict=True):
            self.tensors[name] = average.to(self.device or weight.device)

    def lerp(self, fraction: float) -> None:
        """Move every average by ``fraction`` of the way to its weight."""
        lerp_(list(self.tensors.values()), self.weights(), fraction)
        self.updates += 1

    @property
    def holds(self) -> Which:
        """Which weights the module holds."""
        return "raw" if self._aside is None else "averaged"

    def show(self, which: Which) -> None:
        """Put the averaged or the raw weights into the module.

        Only copies are made and each can be made again, so after an interrupt at any instruction ``show("raw")`` gives
        the raw weights bit for bit.
        """
        if which == "averaged" and self._aside is None and self.updates:
            weights = self.weights()
            self._aside = [w.detach().clone() for w in weights]
            copy_(weights, list(self.tensors.values()))
        elif which == "raw" and self._aside is not None:
            copy_(self.weights(), self._aside)
            self._aside = None

    @contextmanager
    def showing(self, which: Which) -> Iterator[None]:
        """Show the averaged or the raw weights inside the block, then what was shown before."""
        before, untouched = self.holds, self.untouched()
        try:
            self.show(which)
            yield
        finally:
            self.show(before)
            if untouched:
                self.leave()

    def leave(self) -> None:
        """Note the parameters as they are, for ``untouched``."""
        self._left = self._marks()

    def untouched(self) -> bool:
        """Whether the module still has the parameters that were averaged, with the values they had at ``leave``."""
        return self.tensors.keys() <= _named(self.module).keys() and self._left == self._marks()

    def _marks(self) -> list[tuple[int, str]]:
        """What tells a parameter written to; the sum finds writes through ``.data``, which has versions of its own."""
        parameters = [weight for weight in self.weights() if isinstance(weight, nn.Parameter)]
        return [(p._version, str(p.detach().abs().sum(dtype=torch.float64).item())) for p in parameters]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the weights that the module holds now to restore both kinds exactly."""
        counts = {"steps": self.steps, "updates": self.updates}
        if self._aside is None:
            return {**counts, "raw": {}, "averaged": dict(self.tensors)} if self.tensors else {}
        pairs = zip(self.tensors.items(), self.weights(), strict=True)
        rounded = {name: average for (name, average), weight in pairs if average.dtype != weight.dtype}
        return {**counts, "raw": dict(zip(self.tensors, self._aside, strict=True)), "averaged": rounded}

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
        self.steps, self.updates = state["steps"], state["updates"]
        for name in [name for name in names if name in named]:
            average = state["averaged"].get(name)
            self.tensors[name] = copies([named[name]])[0] if average is None else average
            if name in state["raw"]:
                copy_([named[name]], [state["raw"][name]])


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
