"""A DataLoader that is followed: another process can go on amid every pass over it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks.core.exact.indices import Indices, Pass, SamplerState
from lightning_tricks.core.exact.rest import Following, describe
from lightning_tricks.core.exact.workers import InWorker, WorkerStates

SPARE = 4  # batches that Lightning may have fetched beside the one that the fit goes on with


def has_state(loader: Any) -> bool:
    """Whether a loader tells its position itself."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def why_not_followed(loader: Any) -> str | None:
    """The reason why the position in a loader is not known, with the remedy; None if it is."""
    kind = f"a loader of type {type(loader).__name__}"
    if has_state(loader):
        return None
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return (
            f"{kind}, which iterates in a way of its own. Give it state_dict and load_state_dict, or use a DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"{kind} with an IterableDataset, {type(loader.dataset).__name__}. Use torchdata's StatefulDataLoader, and"
            " give the data set state_dict and load_state_dict, or use a data set that gives samples by their numbers"
        )
    if loader.num_workers and not loader.in_order:
        return f"{kind} with in_order=False, whose batches come as workers are done. Leave in_order out"
    return None


class Track:
    """What is known of a loader that a fit reads, and of its present pass.

    Args:
        loader: The loader.
        device: The device that the process trains on.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.state = SamplerState(loader, device)
        self.turn: Pass | None = None
        self.next: Following | None = None
        self._workers, self._stay = loader.num_workers, loader.persistent_workers
        self._ahead = self._workers * (loader.prefetch_factor or 0)  # batches whose numbers workers have already
        source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._indices = Indices(source, self.state, seeds=self._workers > 0)

    def begin_pass(self, loader: DataLoader[Any], ranks: int, epoch: int) -> Iterator[Any]:
        """Begin the next pass over the loader."""
        before, workers = self.turn, self._workers
        part, saved, rest, stayed = self.next or Following()
        self.next = None
        part = part or describe(loader, ranks, epoch)
        turn = self.turn = self._indices.turn = Pass(part, self._ahead + 2 * workers + SPARE, saved, rest)
        states: list[Any] = [None] * workers
        if loader._iterator is not None and before is not None:  # its workers go on
            turn.states["created"] = before.states["created"]
            states = before.workers.latest(before.batches)
        if stayed and len(stayed["states"]) == workers:
            turn.started = turn.states["created"] = stayed["started"]
            states = stayed["states"]
        if saved:
            turn.skipped = turn.batches = first_to_load(saved["batches"], workers)
            states = saved["workers"] if len(saved["workers"]) == workers else states
        turn.workers = WorkerStates(states)
        batches = _Batches(self._read(loader, states), turn)
        if self._indices.given is not None:
            self._indices.given.skip()
        while saved and turn.batches < saved["batches"]:
            next(batches)
        return batches

    def _read(self, loader: DataLoader[Any], states: list[Any]) -> Iterator[Any]:
        """Iterate over the loader by numbers that are followed, with workers that tell their states."""
        read = unfollowed(loader)
        read.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._indices
        if self._workers:
            inside = InWorker(loader.collate_fn, loader.worker_init_fn, states)
            read.collate_fn, read.worker_init_fn = inside.collate, inside.begin
        batches = iter(read)
        loader._iterator = read._iterator
        return batches

    def is_as_far_ahead(self, saved: dict[str, Any] | None) -> bool:
        """Whether the samplers are where those of a saved pass were."""
        return saved is None or saved["ahead"] == self._ahead

    def between_passes(self) -> dict[str, Any]:
        """What another process needs to begin the next pass, as plain values."""
        turn, workers = self.turn, None
        if self._stay and turn is not None:
            started = self._shortened(turn.states["created"])
            workers = {"started": started, "states": turn.workers.latest(turn.batches)}
        return {"own": self.state.own.changed(self.state.own.state()), "workers": workers}

    def begin_between(self, saved: dict[str, Any]) -> None:
        """Let the next pass begin where ``between_passes`` was."""
        self.state.own.load(saved["own"])
        if saved["workers"] is not None:
            self.next = Following(workers=saved["workers"])

    def saved(self, turn: Pass, batches: int) -> dict[str, Any]:
        """What another process needs to go on after so many batches of a pass, as plain values."""
        return {
            "part": turn.part,
            "batches": batches,
            "checksum": turn.checksum(batches),
            "ahead": self._ahead,
            "states": {name: state and self._shortened(state) for name, state in turn.states.items()},
            "workers": turn.workers.before(first_to_load(batches, self._workers), turn.batches),
        }

    def _shortened(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of the samplers without what has turned out to be settings."""
        return {**state, "own": self.state.own.changed(state["own"])}


def first_to_load(batches: int, workers: int) -> int:
    """The batch that loading begins with where a pass goes on after so many batches.

    It is made by the first worker, as it was before. Some batches after it are made a second time, and left out.
    """
    return batches - batches % max(workers, 1)


class _Batches(Iterator[Any]):
    """The batches of a pass, which it counts."""

    def __init__(self, batches: Iterator[Any], turn: Pass) -> None:
        self._batches = batches
        self._turn = turn

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self._turn.workers.count:
            batch, told = batch
            self._turn.workers.add(told)
        self._turn.batches += 1
        return batch

    def __reduce__(self) -> Any:
        return iter, ((),)  # a copy of the Trainer is in no pass


class Follower(Protocol):
    """Who follows a loader."""

    def begin_pass(self, loader: Any) -> Iterator[Any] | None:
        """The batches of the next pass; None if it is not the fit's, or not followed."""


class _Followed:
    """The part of a loader's class that has the fit follow it; all else is as in the user's class."""

    follower: Follower

    def __iter__(self) -> Iterator[Any]:
        batches = self.follower.begin_pass(self)
        if batches is None:
            other = unfollowed(self)
            other._iterator = None
            return iter(other)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Nothing, as the fit saves the position; with this method Lightning knows that the loader can resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unfollowed(self).__reduce_ex__(protocol)


def followed(loader: DataLoader[Any], follower: Follower) -> DataLoader[Any]:
    """A copy of a loader that is followed.

    Nothing else of it differs: other code looks at its class, its samplers and its data set.
    """
    kind: Any = type(loader)
    made: Any = object.__new__(_followed_class(kind))
    made.__dict__.update(vars(loader), follower=follower, _iterator=None)
    return made


def unfollowed(loader: Any) -> Any:
    """A copy of a followed loader that is as the user made it."""
    made: Any = object.__new__(type(loader).__mro__[2])
    made.__dict__.update({name: value for name, value in vars(loader).items() if name != "follower"})
    return made


@cache
def _followed_class(kind: Any) -> Any:
    return type(kind.__name__, (_Followed, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
