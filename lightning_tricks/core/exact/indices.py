"""The samples' numbers that a loader reads, to be given out again; apart from the loader, which reads the samples."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_tricks.core.exact.own_state import OwnState
from lightning_tricks.core.exact.plain import packed, plain, unplain
from lightning_tricks.core.exact.workers import WorkerStates
from lightning_tricks.core.lightning.fit_sampler import FitSampler
from lightning_tricks.core.lightning.loaders import ResizableBatches
from lightning_tricks.core.random_numbers import RandomState, random_numbers_of, random_state, set_random_state

_DRAW_AT_FIRST = (  # with the global generators; their subclasses may draw later, too
    *(BatchSampler, ResizableBatches, DistributedSampler, DistributedSamplerWrapper, RandomSampler),
    *(SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range),
)


class SamplerState:
    """The state on which the order of a loader depends: the global random generators and what its samplers have.

    Args:
        loader: The loader.
        device: The device that the process trains on, whose generator a sampler may use as well.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        names = ("batch_sampler", "sampler", "generator")
        self.own = OwnState({name: getattr(loader, name) for name in names}, apart=[loader.dataset])
        self.device = device

    def state(self) -> dict[str, Any]:
        """The present state, as plain values."""
        return {"random": plain(random_state(self.device)), "own": self.own.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Set the generators and the samplers to a state."""
        if state["random"] is not None:
            set_random_state(unplain(state["random"]), self.device)
        self.own.load(state["own"])

    def shorten(self, before: dict[str, Any]) -> None:
        """Leave the global generators out of a state that nothing has drawn from them since."""
        if packed(before["random"]) == packed(plain(random_state(self.device))):
            before["random"] = None


class Pass:
    """One pass over a loader: what another process needs to go on in its midst.

    Args:
        part: The description of the samples and their order, by ``describe``.
        kept: The number of the last batches whose checksums are kept.
        saved: The saved pass that this one goes on in.
        rest: The numbers of the samples, batch by batch, if the samplers do not give them.
    """

    def __init__(
        self, part: dict[str, Any], kept: int, saved: dict[str, Any] | None = None, rest: Sequence[Any] | None = None
    ) -> None:
        self.part = part
        self.saved = saved
        self.rest = rest
        self.states: dict[str, Any] = dict(saved["states"]) if saved else {}
        self.workers = WorkerStates(())
        self.started: dict[str, Any] | None = None  # the state in which an earlier pass has started the workers
        self.batches = 0  # that were delivered
        self.skipped = 0  # the batches that nobody loads again
        self.begun = 0  # how often the samplers were asked to begin
        self.given = 0  # the batches that the samplers gave
        self.checksums = deque([0], maxlen=kept)  # after each of the last batches that were given
        self.numbers = deque[Any](maxlen=kept)  # of the samples in the last batches that were given

    def checksum(self, batches: int) -> int:
        """The checksum of the numbers of the samples in so many first batches."""
        return self.checksums[batches - self.given - 1]

    def numbers_of(self, batch: int) -> Any:
        """The numbers of the samples in one of the last batches, as the sampler gave them."""
        return self.numbers[batch - self.given]


class Indices:
    """Stands in the place of a loader's sampler: gives what that gives, and skips what a resumed pass has had.

    Torch asks a sampler to begin once, or twice where it starts workers, and draws their seed in between.

    Args:
        source: The batch sampler, or the sampler of a loader that makes no batches.
        state: The state of the samplers.
        seeds: Whether workers are seeded when a pass is created.
    """

    def __init__(self, source: Any, state: SamplerState, seeds: bool) -> None:
        self.turn: Pass | None = None
        self.given: _Given | None = None
        self._source = source
        self._state = state
        self._seeds = seeds
        self._before: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> _Given:
        assert self.turn is not None, "a pass has begun"
        turn, source = self.turn, self._source if self.turn.rest is None else self.turn.rest
        turn.begun += 1
        turn.given = 0
        turn.checksums.clear()
        turn.checksums.append(0)
        turn.numbers.clear()
        if turn.saved:
            self._state.load(turn.states["created" if self._seeds and turn.begun == 1 else "read"])
            numbers = iter(source)
        elif turn.started is not None and turn.begun == 1:
            self._before = self._state.state()
            self._state.load(turn.started)
            numbers = iter(())  # torch asks once more after the seed
        else:
            if turn.started is not None:
                self._state.load(self._before)
            now = self._state.state()
            numbers = iter(source)
            if not (self._seeds and "created" not in turn.states):
                self._state.shorten(now)
            turn.states = {"created": now, **turn.states, "read": now, "first": None}
        self.given = _Given(numbers, turn, self._state, not _draws_at_first(source))
        return self.given


class _Given(Iterator[Any]):
    """The numbers of the samples of one pass.

    A sampler that is not one of torch's may draw from the global generators at any time. It draws from a stream of its
    own then, which begins as a copy of theirs after the first batch, so that its numbers do not depend on those that
    the network draws meanwhile.
    """

    def __init__(self, source: Iterator[Any], turn: Pass, state: SamplerState, draws_later: bool) -> None:
        self._source = source
        self._turn = turn
        self._state = state
        self._draws_later = draws_later
        self._stream: RandomState | None = None

    def __next__(self) -> Any:
        self.skip()
        return self._take()

    def skip(self) -> None:
        """Take the numbers of the batches that nobody loads again."""
        while self._turn.given < self._turn.skipped:
            self._take()

    def _take(self) -> Any:
        turn = self._turn
        try:
            numbers = self._first() if turn.given == 0 else self._later()
        except StopIteration:
            if turn.saved and turn.given < turn.saved["batches"]:
                raise _other_order(turn) from None
            raise
        turn.checksums.append(_checksum(numbers, turn.checksums[-1]))
        turn.numbers.append(numbers)
        turn.given += 1
        if turn.saved and turn.given == turn.saved["batches"] and turn.checksums[-1] != turn.saved["checksum"]:
            raise _other_order(turn)
        return numbers

    def _first(self) -> Any:
        turn = self._turn
        if turn.states["first"] is not None:
            self._state.load(turn.states["first"])
            numbers = next(self._source)
        else:
            turn.states["first"] = now = self._state.state()
            numbers = next(self._source)
            self._state.shorten(now)
        if self._draws_later:
            self._stream = random_state(self._state.device)
        return numbers

    def _later(self) -> Any:
        if self._stream is None:
            return next(self._source)
        with random_numbers_of(self._stream, self._state.device):
            try:
                return next(self._source)
            finally:
                self._stream = random_state(self._state.device)


def _draws_at_first(source: Any) -> bool:
    """Whether a sampler, and the one inside it, draw from the global generators at the beginning of a pass only."""
    known = type(source) in _DRAW_AT_FIRST or isinstance(source, FitSampler)
    return known and (not isinstance(source, BatchSampler) or _draws_at_first(source.sampler))


def _checksum(numbers: Any, before: int) -> int:
    try:
        content = array("q", numbers if isinstance(numbers, list) else [numbers]).tobytes()
    except (TypeError, OverflowError):  # a data set may have texts for numbers
        content = repr(numbers).encode()
    return zlib.crc32(content, before)


def _other_order(turn: Pass) -> MisconfigurationException:
    return MisconfigurationException(
        f"The samples of the first {turn.saved['batches']} batches of the epoch that goes on are not those that it"  # type: ignore[index]
        f" began with: some would come twice and others never. {turn.part['name']} has another seed, other settings, or"
        " a state that cannot be seen: give it state_dict and load_state_dict, or resume from a checkpoint of an"
        " epoch's end."
    )
