"""Averages of a module's weights: updated, put into the module, saved and restored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.core.averaging.transfer import Exchange, Offload
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import buckets, checksum, copies, copy_, global_norm, lerp_, lerp_same_dtype_

Which = Literal["averaged", "raw"]
Place = tuple[dict[str, Any], str]  # the dictionary in which a parameter or buffer is registered, and its key


class Averages:
    """Averages by parameter (or buffer) name, in fp32 or more, and which weights the module holds at present.

    Until the first update the averaged weights *are* the raw weights. While the module holds the averaged weights, the
    averages hold the raw values, if they have the same dtype: the two are exchanged.

    Args:
        weights: The weights that this process holds.
        device: The device of the averages; None for that of the weights.
    """

    def __init__(self, weights: LocalWeights, device: str | None = None) -> None:
        self.weights = weights
        self.device = device
        self.steps = 0
        self.updates = 0
        self.tracks = False  # whether averaging has begun, also on a rank that holds no weights
        self.agreed = False  # whether they have not changed since the ranks took their means
        self._tensors: dict[str, Tensor] = {}
        self._places: list[Place] = []
        self._weights: dict[str, Tensor] = {}  # the averaged parameters and buffers, which may be renamed
        self._converts = self._averages_buffers = False
        self._offload: Offload | None = None
        # While the averaged weights are shown: the exchange to undo, and the raw values that no average can hold.
        self._shown: tuple[Exchange, list[Tensor]] | None = None
        self._checksums: list[int] = []
        self.busy = False  # while weights are exchanged, so that nothing may be saved

    @property
    def module(self) -> nn.Module:
        """The module whose weights are averaged."""
        return self.weights.module

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by name; while the averaged weights are shown, these hold raw values."""
        self.synchronize()
        return self._tensors

    def synchronize(self) -> None:
        """Finish the update that is in progress."""
        if self._offload is not None:
            self._offload.synchronize()

    def parts(self) -> list[Tensor]:
        """The local weights that have an average, in the order of the averages."""
        self.weights.reshard()
        places = _places(self.module)
        if any(name not in places or _is_replaced(self._weights.get(name), places[name]) for name in self._tensors):
            self._follow(places)
        self._places = [places[name] for name in self._tensors]
        self._weights = {name: owner[key] for name, (owner, key) in zip(self._tensors, self._places, strict=True)}
        # A buffer that validation has made in inference mode can be written to through another tensor alone.
        parts = [part.detach() if part.is_inference() else part for part in self._parts()]
        self._averages_buffers = any(not isinstance(weight, nn.Parameter) for weight in self._weights.values())
        self._fit_shapes(parts)
        pairs = zip(parts, self._tensors.values(), strict=True)
        self._converts = any(part.dtype != average.dtype or part.device != average.device for part, average in pairs)
        return parts

    def _fit_shapes(self, parts: Sequence[Tensor]) -> None:
        """Begin the averages of buffers anew whose shape has changed, as copies of them."""
        tensors = zip(self._tensors.items(), parts, strict=True)
        new = {name: part for (name, average), part in tensors if average.shape != part.shape}
        if new:
            self.tensors.update(zip(new, copies(list(new.values()), self.device), strict=True))
            self._offload = Offload.between(self._tensors, parts)

    def _follow(self, places: Mapping[str, Place]) -> None:
        """Rename the averages of weights that were renamed, by pruning or parametrizations.

        Raises:
            MisconfigurationException: If a weight was removed.
        """
        names = {id(owner[key]): name for name, (owner, key) in places.items()}
        new = {name: names.get(id(self._weights.get(name))) for name in self._tensors}
        new |= {name: name for name in self._tensors if new[name] is None and _is_buffer(places.get(name))}
        if gone := [name for name, found in new.items() if found is None]:
            raise MisconfigurationException(
                f"{type(self.module).__name__} has lost {', '.join(gone)}, which is averaged. EMA and SWA follow"
                " weights that are renamed (by pruning or parametrizations), but not weights that are removed or"
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
        """Average the chosen local weights; new averages begin as copies of them.

        Averages of other parameters (frozen by now) are kept, and those of other buffers are dropped.
        """
        self.tracks = True
        self.parts()  # gives renamed weights the averages that they have
        for name in [name for name in dict(self.module.named_buffers()) if name not in chosen]:
            self.tensors.pop(name, None)
        new = {name: weight for name, weight in chosen.items() if name not in self.tensors}
        self.agreed = self.agreed and not new
        self.tensors.update(zip(new, copies(list(new.values()), self.device), strict=True))
        for (name, average), part in zip(list(self.tensors.items()), self.parts(), strict=True):
            self._tensors[name] = average.to(self.device or part.device)
        if self._offload is None or list(self._tensors) != self._offload.names:
            self._offload = Offload.between(self._tensors, self._parts())

    def put(self, buffers: Mapping[str, Tensor]) -> None:
        """Set values of buffers among the averaged weights, until the next ``track``."""
        assert self.holds == "raw", "while the averaged weights are shown the averages have the raw values"
        self.tensors.update({name: buffer.detach().clone() for name, buffer in buffers.items()})
        self.parts()

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], steps: int, updates: int, tracks: bool) -> None:
        """Restore earlier averages, after the weights; averages that began since then become copies of the weights."""
        self.steps, self.updates, self.tracks, self.agreed = steps, updates, tracks, False
        for (name, average), part in zip(self.tensors.items(), self.parts(), strict=True):
            average.copy_(tensors.get(name, part))
        if not tracks:
            self._tensors.clear()
            self.parts()

    def lerp(self, fraction: float) -> None:
        """Update every average: ``average += fraction * (weight - average)``."""
        self.weights.reshard()
        # Not self.parts(), since finding the names takes as long as averaging a small network.
        try:
            parts = self._parts()
        except KeyError:  # a weight was renamed
            parts = self.parts()
        if self._averages_buffers:
            self._fit_shapes(parts)
        averages = list(self.tensors.values())
        if self._offload is not None:
            self._offload.start(averages, parts, fraction)
        elif self._converts:
            lerp_(averages, parts, fraction)
        else:
            lerp_same_dtype_(averages, parts, fraction)
        self.updates += 1
        self.agreed = False

    def guard(self) -> None:
        """Let the device wait for copies of the weights that are in progress, before the weights change."""
        if self._offload is not None:
            self._offload.guard()

    @property
    def holds(self) -> Which:
        """Which weights the module holds."""
        return "raw" if self._shown is None else "averaged"

    def show(self, which: Which) -> None:
        """Put the averaged or the raw weights into the module; under ZeRO all ranks take part for the averaged ones.

        After an interruption at any instruction, ``show("raw")`` restores the raw weights bit for bit. It needs no
        other rank, since that may have failed.
        """
        with self.marked_busy():
            if which == "averaged" and self._shown is None and self.updates:
                exchanged, copied = self._split()
                exchange = Exchange(list(exchanged), list(exchanged.values()))
                self._shown = exchange, [tensor.detach().clone() for tensor in self._without_average(copied)]
                exchange.run(list(exchanged.values()), self.tensors)
                copy_(list(copied.values()), [self.tensors[name] for name in copied])
                self.weights.update_model()
            elif which == "raw" and self._shown is not None:
                (exchange, saved), (exchanged, copied) = self._shown, self._split()
                exchange.run(list(exchanged.values()), self.tensors, back=True)
                copy_(self._without_average(copied), saved)
                self.weights.release()
                self._shown = None

    @contextmanager
    def marked_busy(self) -> Iterator[None]:
        """Mark the averages as busy inside the block, so that nothing is saved in between."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _split(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The local weights of the same dtype as their averages, which can be exchanged, and the others."""
        parts = dict(zip(self.tensors, self.parts(), strict=True))
        exchanged = {name: part for name, part in parts.items() if part.dtype == self._tensors[name].dtype}
        return exchanged, {name: part for name, part in parts.items() if name not in exchanged}

    def _without_average(self, copied: dict[str, Tensor]) -> list[Tensor]:
        """The tensors whose raw values no average can hold while the averaged weights are shown."""
        return [*copied.values(), *self.weights.model_copies()]

    @contextmanager
    def showing(self, which: Which) -> Iterator[None]:
        """Show the averaged or the raw weights inside the block, and the earlier ones after it."""
        before = self.holds
        try:
            self.show(which)
            yield
        finally:
            self.show(before)

    def distance(self, device: torch.device) -> float:
        """``||weights - averages|| / ||weights||`` over the shards of all ranks; all ranks take part.

        Args:
            device: The device on which the ranks add up their shares.
        """
        parts, averages = self.parts(), list(self.tensors.values())
        owners = self.weights.copies(list(self.tensors))
        squares = torch.zeros(2, device=device)
        for bucket in buckets(averages):
            squares = squares + _squares(parts[bucket], averages[bucket], owners[bucket]).to(device)
        if self.weights.sharded:
            dist.all_reduce(squares)
        between, size = squares.sqrt().tolist()
        return between / size if size else 0.0

    def remember_weights(self) -> None:
        """Remember the values of the parameters, for ``unchanged``."""
        self._checksums = self._current_checksums()

    def unchanged(self) -> bool:
        """Whether the module has the averaged parameters, with the values that they had at ``remember_weights``."""
        if not self.tensors.keys() <= _places(self.module).keys():
            return False
        return self._current_checksums()[: len(self._checksums)] == self._checksums  # others may have joined since

    def _current_checksums(self) -> list[int]:
        """The checksums of the parameters; their versions would miss writes through ``.data``."""
        buffers = dict(self.module.named_buffers())
        return [checksum(p) for name, p in zip(self._tensors, self.parts(), strict=True) if name not in buffers]

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint needs besides the module's present weights, to restore both kinds exactly."""
        counts = {"steps": self.steps, "updates": self.updates}
        if self._shown is None:
            return {**counts, "raw": {}, "averaged": dict(self.tensors)}
        exchanged, copied = self._split()
        raw, averaged = ({name: self._tensors[name] for name in names} for names in (exchanged, copied))
        saved = dict(zip(averaged, self._shown[1], strict=False))  # the rest is derived from ZeRO's master weights
        return {**counts, "raw": {**raw, **saved}, "averaged": averaged}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], tracked: Collection[str]) -> None:
        """Load a state, after the module has loaded the ``state_dict`` of the checkpoint.

        Args:
            state: A state of averages; weights that the module does not have are left out.
            tracked: The weights that get an average, if the state has them.
        """
        parts, tensors = self.local_parts({**state["raw"], **state["averaged"]}), {}
        for name in [name for name in parts if name in tracked]:
            average = state["averaged"].get(name)
            tensors[name] = copies([parts[name]])[0] if average is None else average
        raw = [name for name in state["raw"] if name in parts]
        copy_([parts[name] for name in raw], [state["raw"][name] for name in raw])
        self.adopt(tensors, state["steps"], state["updates"])

    def local_parts(self, names: Iterable[str]) -> dict[str, Tensor]:
        """This rank's parts of the weights of these names that the module has."""
        self.weights.reshard()
        places = _places(self.module)
        parts = {name: self.weights.local(places[name][0][places[name][1]]) for name in names if name in places}
        return {name: part for name, part in parts.items() if part is not None}

    def adopt(self, tensors: dict[str, Tensor], steps: int, updates: int) -> None:
        """Take tensors for the averages; the module has its raw weights, which may just have been written."""
        self._tensors, self.steps, self.updates, self.tracks = tensors, steps, updates, bool(tensors)
        self.agreed = True  # all ranks have read the same checkpoint
        self.weights.update_model()


@torch.no_grad()
def _squares(parts: list[Tensor], averages: list[Tensor], owners: list[int]) -> Tensor:
    """This rank's share of the squared norms of ``weights - averages`` and of the weights, of shape (2,)."""
    near = [part.to(average.device, average.dtype) for part, average in zip(parts, averages, strict=True)]
    roots = [sqrt(number) for number in owners]
    between = torch._foreach_div(torch._foreach_sub(near, averages), roots)
    return torch.stack([global_norm(between), global_norm(torch._foreach_div(near, roots))]) ** 2


def _is_replaced(known: Tensor | None, place: Place) -> bool:
    """Whether another parameter is in the place of one; buffers may be replaced.

    A parameter that ``Module.to`` moves to an XLA device, or from it, becomes another object.
    """
    owner, key = place
    return isinstance(known, nn.Parameter) and owner[key] is not known and owner[key].device == known.device


def _is_buffer(place: Place | None) -> bool:
    return place is not None and not isinstance(place[0][place[1]], nn.Parameter)


def _places(module: nn.Module) -> dict[str, Place]:
    """The places of all parameters and buffers by name: the dictionaries of ``register_parameter``, and the keys."""
    return {
        f"{path}.{key}" if path else key: (owner, key)
        for path, submodule in module.named_modules()
        for owner in (submodule._parameters, submodule._buffers)
        for key, tensor in owner.items()
        if tensor is not None
    }
