"""A device that is not there: real numbers, computed on the CPU, in tensors that say that they are on it.

A dispatch mode sees each operation of torch. It raises where the device would (devices that do not agree, a generator
of another one, types of numbers that it has not), draws the device's random numbers from a generator of its own, and
lists what makes the host wait for the device, and what the host does too early with memory of a ``non_blocking`` copy.
What Python code asks of tensors and of ``torch`` is in ``python_names.py``.

There are no real streams, kernels and compiled code; two tensors that C++ code mixes can be missed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tests.device.memory import Memory
from tests.device.storage import ARRIVES, LEAVES, PINNED, UNKNOWN, key, notes, on_device, put

aten = torch.ops.aten
IN_PLACE_COPIES = {aten.copy_, aten._foreach_copy_}
COPIES = {aten._to_copy, aten.copy, *IN_PLACE_COPIES}
SIZED_BY_VALUES = {  # their result has a size that the host must know
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount),
    *(aten.equal, aten._ctc_loss),
}
TAKES_NUMBERS = {aten.fill, aten.fill_, aten.masked_fill, aten.masked_fill_}
BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
NO_CALLERS = ("/torch/", "/contextlib.py", "/device/simulation.py", "/device/python_names.py", "/unittest/mock.py")


@dataclass(frozen=True)
class Found:
    """A finding, and the innermost line of the package that led to it, or else the innermost line outside of torch."""

    what: str
    where: str
    ours: bool


class Simulation(TorchDispatchMode):
    """The device, and what was found.

    Args:
        device: Its type and number.
        lacks: Types of numbers that it has not, as MPS lacks float64.
        package: The package whose lines are named.
    """

    def __init__(
        self, device: torch.device, lacks: Collection[torch.dtype] = (), package: str = "lightning_tricks"
    ) -> None:
        super().__init__()
        self.device, self.lacks, self.package = device, frozenset(lacks), package
        self.waits: list[Found] = []  # for which the host stops until the device has done all that it was given
        self.races: list[Found] = []  # of the host with a copy that it has not waited for
        self.memory: Memory | None = None  # counts new tensors, if there is one
        self.generator = torch.Generator().manual_seed(0)
        self.current: int | None = None  # the number of the device that was set; None before
        self.copies = self.arrived = 0  # non_blocking copies so far, and those that the host knows to be over
        self.moves = self.asks = False  # whether Python code has named the device of the present operation
        self.inside = False  # whether Python code computes for another library's operation, on the CPU

    def is_it(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self.device.type

    def waits_for(self, what: str, copies: int | None = None) -> None:
        """Note that the host stops until the device has done what it was given: so many copies, or all."""
        self.waits.append(self._found(what))
        self.arrived = max(self.arrived, self.copies if copies is None else copies)

    def races_with(self, what: str) -> None:
        self.races.append(self._found(what))

    def _found(self, what: str) -> Found:
        frame: FrameType | None = sys._getframe(1)
        innermost = None
        while frame is not None:
            file = frame.f_code.co_filename
            line = f"{file.split('site-packages/')[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
            if f"/{self.package}/" in file:
                return Found(what, line.split(f"/{self.package}/")[-1], ours=True)
            if innermost is None and not any(part in file for part in NO_CALLERS):
                innermost = line
            frame = frame.f_back
        return Found(what, innermost or "nowhere", ours=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented  # the tensors inside come here by themselves
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # of tensors without contents, which know their devices
        packet, begun = func.overloadpacket, self.copies
        self._look_for_races(func, args, given)
        where = self._copy(packet, args, kwargs) if packet in COPIES else self._where(func, args, kwargs, given)
        if where:
            self._on_the_device(func, args, kwargs, given)
        if self.is_it(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        pinned = kwargs.pop("pin_memory", None)
        random = where and torch.Tag.nondeterministic_seeded in func.tags
        outside, self.inside = self.inside, func.namespace not in ("aten", "prims", "_c10d_functional")
        try:
            with self._random_numbers() if random else nullcontext():
                result = func(*args, **kwargs)
        finally:
            self.inside = outside
        if packet not in IN_PLACE_COPIES:
            self._put(result, given, where, packet, pinned)
        if packet is aten._to_copy and self.copies > begun and not where:
            notes(result).update({ARRIVES: self.copies, PINNED: True})
        return result

    def _put(self, result: Any, given: Sequence[Tensor], where: bool | None, packet: Any, pinned: bool | None) -> None:
        """Note where the new tensors of a result are."""
        if where is not False and packet not in COPIES:
            for x in given:
                if UNKNOWN in notes(x) and x.ndim:
                    put(x, True)
        known = {key(x) for x in given}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (memory := key(x)) is not None and memory not in known:
                put(x, where)
                if self.memory is not None:
                    self.memory.note(x, where)
                if where and x.dtype in self.lacks:
                    raise TypeError(f"Cannot convert a tensor to {x.dtype}, which the device does not support.")
                if pinned:
                    notes(x)[PINNED] = True

    def _where(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> bool | None:
        """Whether the result of an operation is on the device; None if nobody knows."""
        if (asked := kwargs.get("device")) is not None:
            if self.asks or torch.device(asked).type != "cpu":
                return self.is_it(asked)
            return any(map(on_device, given)) if given else None  # C++ code says CPU when it means a tensor's device
        there = [on_device(x) for x in given]
        if any(there) and not all(there):
            self._mixed(func, args, given)
        return True if any(there) else None if any(UNKNOWN in notes(x) for x in given) else False

    def _mixed(self, func: Any, args: Any, given: list[Tensor]) -> None:
        """Raise for devices that do not agree.

        Scalar tensors in host memory may stand in element-wise operations, indices in the brackets of a tensor; lists
        of tensors must agree row by row.
        """
        host, packet = [x for x in given if not on_device(x) and UNKNOWN not in notes(x)], func.overloadpacket
        written_to = func._schema.is_mutable and any(x is given[0] for x in host)
        scalars = all(x.ndim == 0 for x in host) and not written_to
        if not host or (scalars and (torch.Tag.pointwise in func.tags or packet in TAKES_NUMBERS)):
            return
        if packet in BY_INDEX and on_device(args[0]):
            if any(x.ndim for x in host):
                self.waits_for("an index in host memory")
            return
        if any(mark in func._schema.name for mark in ("aten::_foreach_", "_fused_", "_amp_")):
            lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor)]
            rows = ([x for x in row if x.ndim or x is row[0]] for row in zip(*lists, strict=False))
            if all(len(set(map(on_device, row))) == 1 for row in rows):
                return
        places = [(tuple(x.shape), x.device.type) for x in given]
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices,"
            f" {self.device} and cpu! ({func}: {places})"
        )

    def _on_the_device(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        """What an operation on the device must not have, and whether the host waits for its result."""
        packet, generator = func.overloadpacket, kwargs.get("generator")
        if generator is not None and generator._cdata != self.generator._cdata:
            raise RuntimeError(f"Expected a '{self.device.type}' device type for generator but found 'cpu'")
        if packet is aten._local_scalar_dense:
            self.waits_for("item")
        elif packet in SIZED_BY_VALUES or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            self.waits_for(packet.__name__)
        elif packet in BY_INDEX and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            number = packet is not aten.index and args[2].numel() == 1 and not on_device(args[2])
            if not number:  # which would only fill
                self.waits_for("an index that is a mask")

    def _copy(self, packet: Any, args: Any, kwargs: Any) -> bool:
        """Whether the result of a copy is on the device; a copy from one memory to the other takes its time."""
        asynchronous = bool(kwargs.get("non_blocking", False) or (packet in IN_PLACE_COPIES and any(args[2:3])))
        if packet is aten._to_copy:
            asked = kwargs.get("device")
            named = asked is not None and (self.moves or self.is_it(asked))  # a backward pass names the CPU as well
            where = self.is_it(asked) if named else on_device(args[0])
            self._transfer(args[0], None, where, asynchronous)
            return where
        targets, sources = args[:2] if isinstance(args[0], list | tuple) else ([args[0]], [args[1]])
        for target, source in zip(targets, sources, strict=True):
            self._transfer(source, target, on_device(target), asynchronous)
        return bool(targets) and on_device(targets[0])

    def _read(self, host: Iterable[Tensor]) -> None:
        if any(notes(x).get(ARRIVES, 0) > self.arrived for x in host):
            self.races_with("reads a non_blocking copy, for which nobody has waited")

    def _transfer(self, source: Tensor, target: Tensor | None, where: bool, asynchronous: bool) -> None:
        if not (where and asynchronous):  # else the device reads, in the order of its work
            self._read([source])
        if where == on_device(source) or UNKNOWN in notes(source):
            return
        if not asynchronous:
            self.waits_for(f"a copy to the {'device' if where else 'host'}")
            return
        self.copies += 1
        if where and PINNED in notes(source):
            notes(source)[LEAVES] = self.copies
        elif not where and target is not None:
            notes(target)[ARRIVES] = self.copies

    def _look_for_races(self, func: Any, args: Any, given: list[Tensor]) -> None:
        """List what reads a copy that has not arrived, or overwrites one that has not left."""
        written = tree_leaves(args[0]) if func._schema.is_mutable and args else []
        if func.overloadpacket not in COPIES:
            self._read(given)
        if any(notes(x).get(LEAVES, 0) > self.arrived for x in written if isinstance(x, Tensor)):
            self.races_with("overwrites a non_blocking copy, for which nobody has waited")

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Draw the device's random numbers inside the block."""
        host = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(host)
