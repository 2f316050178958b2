"""Averages of a module's weights, and their place: in the module, beside it, in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.core.averaging.exchange import Exchange
from lightning_tricks.core.averaging.offload import Offload
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import checksum, copies, copy_, lerp_, lerp_same_dtype_

Which = Literal["averaged", "raw"]
Place = tuple[dict[str, Any], str]  # the dictionary that a parameter or buffer is registered in, and its key


class Averages:
    """Averages by parameter (or buffer) name, at least fp32, and which weights the module holds at the moment.

    Until the first update the averaged weights *are* the raw weights, whatever the averages say. While the module shows
    the averaged ones, the averages of the same dtype have the raw values: the two have changed places.

    Args:
        weights: Where this process holds the weights that are averaged.
        device: Where the averages live; None for beside the weights.
    """

    def __init__(self, weights: LocalWeights, device: str | None = None) -> None:
        self.weights = weights
        self.device = device
        self.steps = 0
        self.updates = 0
        self.tracks = False  # whether averaging has begun; a rank may have no part in it
        self._tensors: dict[str, Tensor] = {}
        self._places: list[Place] = []
        self._weights: dict[str, Tensor] = {}  # the parameters and buffers that are averaged, to find them when renamed
        self._converts = False
        self._offload: Offload | None = None
        # while the averaged weights are shown: the way back, and the raw values that find no place in an average
        self._shown: tuple[Exchange, list[Tensor]] | None = None
        self._left: list[int] = []
        self.busy = False  # while weights change places, or stand in for others

    @property
    def module(self) -> nn.Module:
        """The module whose weights are averaged."""
        return self.weights.module

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by name; while the averaged weights are shown, see the class."""
        if self._offload is not None:
            self._offload.synchronize()
        return self._tensors

    def parts(self) -> list[Tensor]:
        """The tensors that have an average, in the order of the averages."""
        self.weights.reshard()
        places = _places(self.module)
        if any(name not in places or _is_replaced(self._weights.get(name), places[name]) for name in self._tensors):
            self._follow(places)
        self._places = [places[name] for name in self._tensors]
        self._weights = {name: owner[key] for name, (owner, key) in zip(self._tensors, self._places, strict=True)}
        parts = self._parts()
        pairs = zip(parts, self._tensors.values(), strict=True)
        self._converts = any(part.dtype != average.dtype or part.device != average.device for part, average in pairs)
        return parts

    def _follow(self, places: Mapping[str, Place]) -> None:
        """Give the averages of weights that were renamed (pruned, parametrized) their new names.

        Raises:
            MisconfigurationException: If a weight is gone.
        """
        names = {id(owner[key]): name for name, (owner, key) in places.items()}
        new = {name: names.get(id(self._weights.get(name))) for name in self._tensors}
        new |= {name: name for name in self._tensors if new[name] is None and _is_buffer(places.get(name))}
        if gone := [name for name, found in new.items() if found is None]:
            raise MisconfigurationException(
                f"{type(self.module).__name__} has lost {', '.join(gone)}, which is averaged. EMA and SWA follow"
                " weights that are renamed (by pruning, by parametrizations), and not those that are removed or"
                " replaced: replace layers before the fit, or leave the averages out."
            )
        self._tensors = {str(new[name]): average for name, average in self._tensors.items()}
        if self._shown is not None:
            self._shown[0].names = [str(new[name]) for name in self._shown[0].names]
        self._places = [places[name] for name in self._tensors]
        self._offload = Offload.between(self._tensors, self._parts())

    def _parts(self) -> list[Tensor]:
        parts = [self.weights.local(owner[key]) for owner, key in self._places]
        return [part for part in parts if part is not None]

    def track(self, chosen: Mapping[str, Tensor]) -> None:
        """Average the chosen local parts, from a copy for those that have no average yet, and move all to their device.

        Averages of other parameters (frozen meanwhile) stay, those of other buffers go.
        """
        self.tracks = True
        self.parts()  # weights that were renamed since have averages already
        for name in [name for name in dict(self.module.named_buffers()) if name not in chosen]:
            self.tensors.pop(name, None)
        new = {name: weight for name, weight in chosen.items() if name not in self.tensors}
        self.tensors.update(zip(new, copies(list(new.values()), self.device), strict=True))
        for (name, average), part in zip(list(self.tensors.items()), self.parts(), strict=True):
            self._tensors[name] = average.to(self.device or part.device)
        if self._offload is None or list(self._tensors) != self._offload.names:
            self._offload = Offload.between(self._tensors, self._parts())

    def put(self, buffers: Mapping[str, Tensor]) -> None:
        """Give buffers values of their own in the averaged set, until ``track`` takes them out again."""
        assert self.holds == "raw", "while the averaged weights are shown the averages have the raw values"
        self.tensors.update({name: buffer.detach().clone() for name, buffer in buffers.items()})
        self.parts()

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], steps: int, updates: int, tracks: bool) -> None:
        """Go back to what was, after the weights; those without an average then join once more, as they are now."""
        self.steps, self.updates, self.tracks = steps, updates, tracks
        for (name, average), part in zip(self.tensors.items(), self.parts(), strict=True):
            average.copy_(tensors.get(name, part))
        if not tracks:
            self._tensors.clear()
            self.parts()

    def lerp(self, fraction: float) -> None:
        """Move every average by ``fraction`` of the way to its weight."""
        self.weights.reshard()
        # not self.parts(): to look the names up costs as much as to average a small network
        try:
            parts = self._parts()
        except KeyError:  # a weight was renamed since
            parts = self.parts()
        averages = list(self.tensors.values())
        if self._offload is not None:
            self._offload.start(averages, parts, fraction)
        elif self._converts:
            lerp_(averages, parts, fraction)
        else:
            lerp_same_dtype_(averages, parts, fraction)
        self.updates += 1

    def guard(self) -> None:
        """The weights may change from now on: let the device wait for copies of them that are under way."""
        if self._offload is not None:
            self._offload.guard()

    @property
    def holds(self) -> Which:
        """Which weights the module holds."""
        return "raw" if self._shown is None else "averaged"

    def show(self, which: Which) -> None:
        """Put the averaged or the raw weights into the module; under ZeRO all ranks put the averaged ones together.

        Whatever is interrupted, and at any instruction, ``show("raw")`` gives the raw weights bit for bit. It needs no
        other rank, which may have failed.
        """
        with self.marked_busy():
            self._change_places(which)

    @contextmanager
    def marked_busy(self) -> Iterator[None]:
        """Tell that the module is in between inside the block, so that nothing is saved there."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _change_places(self, which: Which) -> None:
        if which == "averaged" and self._shown is None and self.updates:
            alike, other = self._split()
            exchange = Exchange(list(alike), list(alike.values()))
            self._shown = exchange, [tensor.detach().clone() for tensor in self._without_place(other)]
            exchange.run(list(alike.values()), self.tensors)
            copy_(list(other.values()), [self.tensors[name] for name in other])
            self.weights.update_model()
        elif which == "raw" and self._shown is not None:
            (exchange, aside), (alike, other) = self._shown, self._split()
            exchange.run(list(alike.values()), self.tensors, back=True)
            copy_(self._without_place(other), aside)
            self.weights.release()
            self._shown = None

    def _split(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parts that can exchange values with their averages, being of one dtype, and the others."""
        parts = dict(zip(self.tensors, self.parts(), strict=True))
        alike = {name: part for name, part in parts.items() if part.dtype == self._tensors[name].dtype}
        return alike, {name: part for name, part in parts.items() if name not in alike}

    def _without_place(self, other: dict[str, Tensor]) -> list[Tensor]:
        """The tensors whose raw values find no place in an average while the averaged weights are shown."""
        return [*other.values(), *self.weights.model_copies()]

    @contextmanager
    def showing(self, which: Which) -> Iterator[None]:
        """Show the averaged or the raw weights inside the block, then what was shown before."""
        before = self.holds
        try:
            self.show(which)
            yield
        finally:
            self.show(before)

    def leave(self) -> None:
        """Note the parameters as they are, for ``untouched``."""
        self._left = self._marks()

    def untouched(self) -> bool:
        """Whether the module still has the parameters that were averaged, with the values they had at ``leave``."""
        return self.tensors.keys() <= _places(self.module).keys() and self._left == self._marks()

    def _marks(self) -> list[int]:
        """A checksum of each parameter: versions do not tell, since writes through ``.data`` have their own."""
        buffers = dict(self.module.named_buffers())
        return [checksum(p) for name, p in zip(self._tensors, self.parts(), strict=True) if name not in buffers]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the weights that the module holds now to restore both kinds exactly."""
        counts = {"steps": self.steps, "updates": self.updates}
        if self._shown is None:
            return {**counts, "raw": {}, "averaged": dict(self.tensors)}
        alike, other = self._split()
        raw, averaged = ({name: self._tensors[name] for name in names} for names in (alike, other))
        aside = dict(zip(averaged, self._shown[1], strict=False))  # behind them are what ZeRO derives from its masters
        return {**counts, "raw": {**raw, **aside}, "averaged": averaged}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Take up what ``state_dict`` gave, after the checkpoint's ``state_dict`` went into the module.

        Raises:
            KeyError: If ``strict`` and the checkpoint averaged weights that the module does not have.
        """
        self.weights.reshard()
        places = _places(self.module)
        names = {**state["raw"], **state["averaged"]}
        if strict and (unknown := sorted(names.keys() - places.keys())):
            raise KeyError(
                f"The checkpoint has averages of weights that {type(self.module).__name__} does not have:"
                f" {', '.join(unknown)}. Load it into the module it was made with, or set strict_loading=False."
            )
        self.steps, self.updates, self.tracks = state["steps"], state["updates"], bool(names)
        for name in [name for name in names if name in places]:
            owner, key = places[name]
            part, average = self.weights.local(owner[key]), state["averaged"].get(name)
            assert part is not None, "a checkpoint holds the parts that this rank saved"
            self._tensors[name] = copies([part])[0] if average is None else average
            if name in state["raw"]:
                copy_([part], [state["raw"][name]])
        self.weights.update_model()


def _is_replaced(known: Tensor | None, place: Place) -> bool:
    """Whether a parameter that is known is another object than the one in its place; buffers may be replaced."""
    owner, key = place
    return isinstance(known, nn.Parameter) and owner[key] is not known


def _is_buffer(place: Place | None) -> bool:
    return place is not None and not isinstance(place[0][place[1]], nn.Parameter)


def _places(module: nn.Module) -> dict[str, Place]:
    """Where each parameter and buffer is found by name; the dictionaries are those of ``register_parameter``."""
    return {
        f"{path}.{key}" if path else key: (owner, key)
        for path, each in module.named_modules()
        for owner in (each._parameters, each._buffers)
        for key, tensor in owner.items()
        if tensor is not None
    }
