"""The passes over all loaders of a fit, fetch by fetch; apart from reading, which resumes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES

from lightning_tricks.core.exact.generators import Generators
from lightning_tricks.core.exact.loader import Track, followed, has_state
from lightning_tricks.core.exact.rest import Following

KEPT = 3  # the last fetches: Lightning may be ahead of the batch that a resumed fit goes on with by two


class Moment(NamedTuple):
    """What there is right before a batch is fetched.

    Args:
        random: The states of the random generators.
        positions: Of each loader its pass and the number of its batches, or the state that it tells itself.
        used_up: Whether each loader has been read to its end, where it begins again then.
    """

    random: dict[str, Any]
    positions: list[Any]
    used_up: list[bool]


class Passes:
    """The passes over the loaders that one combined loader has.

    Args:
        loaders: The combined loader, whose loaders are replaced by ones that are followed, until ``close``.
        device: The device that the process trains on.
        ranks: The number of ranks that share the samples.
        epoch: Function that gives the number of the epoch that passes begin for.
    """

    def __init__(self, loaders: Any, device: torch.device, ranks: int, epoch: Callable[[], int]) -> None:
        self.loaders = loaders
        self.waits = False  # whether the loaders are not to be read yet
        self.blind = False  # whether passes are not followed, since they begin where nobody knows
        self.epoch: int | None = None  # that of the present passes
        self.length: int | None = None  # the number of batches in these, if it is not that of the loaders
        self.fetched = 0
        self.tracks = [None if has_state(loader) else Track(loader, device) for loader in loaders.flattened]
        roots = {str(number): _owners(loader) for number, loader in enumerate(loaders.flattened)}
        self.generators = Generators(device, roots)
        self._plain, self._kind = loaders.flattened, type(loaders)
        self._ranks, self._epoch = ranks, epoch
        self._reads = False  # whether the fit itself reads now
        self._moments: dict[int, Moment] = {}  # by the number of batches that were fetched before
        self._states: list[Any] = []  # of the generators, to be set before the next fetches
        self._used_up: list[bool] = []
        self.loaders.flattened = [
            loader if track is None else followed(loader, _Follower(self, track))
            for loader, track in zip(self._plain, self.tracks, strict=True)
        ]
        # Lightning and the user hold this object in several places, so that another one in its place would be missed.
        kind: Any = type(self._kind.__name__, (FollowedLoaders, self._kind), {})
        self.loaders.__class__, self.loaders.passes = kind, self

    @property
    def loaders_with_state(self) -> list[Any]:
        """The loaders that tell their states themselves."""
        return [loader for loader, track in zip(self._plain, self.tracks, strict=True) if track is None]

    def close(self) -> None:
        """Leave the loaders as they were."""
        self.loaders.flattened = self._plain
        self.loaders.__class__ = self._kind
        del self.loaders.passes

    def go_on(self, following: Sequence[Following | None], states: Sequence[Any], used_up: Sequence[bool]) -> None:
        """Let the next passes go on where others were.

        Args:
            following: How the pass over each loader begins.
            states: The states of the generators before the first fetches.
            used_up: Whether each loader has been read to its end.
        """
        self._states, self._used_up = [*states], [*used_up]
        for track, how in zip(self.tracks, following, strict=True):
            if track is not None:
                track.next = how

    def are_as_far_ahead(self, saved: Sequence[Any]) -> bool:
        """Whether the samplers are where those of saved passes were, with which their generators may be compared."""
        pairs = zip(self.tracks, saved, strict=True)
        return all(track is None or track.is_as_far_ahead(one) for track, one in pairs)

    def begin_between(self, saved: Sequence[dict[str, Any] | None]) -> None:
        """Let the next passes begin between those where the loaders were."""
        for track, one in zip(self.tracks, saved, strict=False):
            if track is not None and one is not None:
                track.begin_between(one)

    def renew(self, states: Sequence[Any]) -> None:
        """Let the next passes over the loaders that tell their states be those after these, of ends of passes.

        Some begin the next pass when such a state is loaded, others are at the end of theirs once more.
        """
        for loader, state in zip(self.loaders_with_state, states, strict=False):
            loader.load_state_dict(deepcopy(state))
            if next(iter(loader), self) is not self:
                loader.load_state_dict(deepcopy(state))

    def iterate(self, original: Callable[[], Any]) -> None:
        """Begin the passes."""
        if self.waits:  # Lightning asks for the number of batches, and may try to fetch
            mode = _SUPPORTED_MODES[self.loaders._mode]["iterator"]
            self.loaders._iterator = mode(self.loaders.flattened, self.loaders.limits)
            return
        self.epoch, self.fetched, self._moments = self._epoch(), 0, {}
        self._reading(original)
        if self._used_up:
            self.loaders._iterator._consumed, self._used_up = self._used_up, []

    def fetch(self, original: Callable[[], Any]) -> Any:
        """Fetch the next batch of the fit."""
        if self.waits:
            raise StopIteration
        if self._states:
            self.generators.load(self._states.pop(0))
        self._moments[self.fetched] = self.now()
        self._moments.pop(self.fetched - KEPT, None)
        batch = self._reading(original)
        self.fetched += 1
        return batch

    def _reading(self, original: Callable[[], Any]) -> Any:
        self._reads = True
        try:
            return original()
        finally:
            self._reads = False

    def begin_pass(self, loader: Any, track: Track) -> Iterator[Any] | None:
        """The batches of the next pass over a loader; None if it is not the fit's, or not followed."""
        if self.blind or not self._reads:  # a hook of the user's may look at the loader in the midst of an epoch
            return None
        assert self.epoch is not None, "the epoch is known before its passes begin"
        return track.begin_pass(loader, self._ranks, self.epoch)

    def now(self) -> Moment:
        """The present moment."""
        positions = [
            deepcopy(loader.state_dict()) if track is None else track.turn and (track.turn, track.turn.batches)
            for loader, track in zip(self._plain, self.tracks, strict=True)
        ]
        return Moment(self.generators.state(), positions, [*getattr(self.loaders._iterator, "_consumed", ())])

    def moment(self, number: int) -> Moment:
        """The moment before a fetch."""
        return self._moments[number] if number < self.fetched else self.now()

    def numbers(self, fetch: int) -> Any:
        """The numbers of the samples in one of the last fetches, as the only sampler gave them.

        They are None where there are several loaders, or one that tells its state itself.
        """
        if len(self.tracks) > 1 or self.tracks[0] is None or self.blind:
            return None
        turn, batches = self._moments[fetch].positions[0]
        return turn.numbers_of(batches)

    def saved(self, moment: Moment) -> list[Any]:
        """The positions of a moment as plain values."""
        return [
            {"state": position} if track is None else position and track.saved(*position)
            for track, position in zip(self.tracks, moment.positions, strict=True)
        ]


class FollowedLoaders(CombinedLoader):
    """The class of a combined loader whose passes are followed."""

    passes: Passes

    def __iter__(self) -> FollowedLoaders:
        if self.passes.loaders is self:  # and not a copy, for another pass
            self.passes.iterate(super().__iter__)
        else:
            super().__iter__()
        return self

    def __next__(self) -> Any:
        return self.passes.fetch(super().__next__) if self.passes.loaders is self else super().__next__()

    def __len__(self) -> int:
        return super().__len__() if self.passes.length is None else self.passes.length

    def _state_dicts(self) -> list[dict[str, Any]]:
        return [loader.state_dict() for loader in self.passes.loaders_with_state]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        for loader, state in zip(self.passes.loaders_with_state, states, strict=True):
            loader.load_state_dict(state)


class _Follower(NamedTuple):
    passes: Passes
    track: Track

    def begin_pass(self, loader: Any) -> Iterator[Any] | None:
        return self.passes.begin_pass(loader, self.track)


def _owners(loader: Any) -> list[Any]:
    """What may hold random generators that are drawn from while batches are made."""
    names = ("dataset", "collate_fn", "batch_sampler", "sampler", "generator")
    return [] if has_state(loader) else [getattr(loader, name) for name in names]
