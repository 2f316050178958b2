"""The reading of a fit's loaders in checkpoints: saved for all ranks, and gone on with in other processes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.exact.generators import Generators
from lightning_tricks.core.exact.loader import why_not_followed
from lightning_tricks.core.exact.passes import KEPT, Moment, Passes
from lightning_tricks.core.exact.plain import plain
from lightning_tricks.core.exact.rest import Following, go_on
from lightning_tricks.core.lightning.fit import Fit, fit_of
from lightning_tricks.core.lightning.loaders import set_batches
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.resume import begin_epoch, epoch_is_over, leave_last_batch
from lightning_tricks.core.lightning.trainer import data_parallel, takes_dataloader_iter


class Reading:
    """The reading of the training loaders in one fit.

    The position in an epoch is found by a replay: the samplers are set to the state in which they began, and asked for
    the numbers of the samples once more. No sample is loaded for that.

    Args:
        trainer: The Trainer.
        fit: Its fits, of which the present one is followed.
    """

    def __init__(self, trainer: L.Trainer, fit: Fit) -> None:
        self.strict: str | None = None  # the trick that raises where a fit cannot go on exactly
        self.repeats_validation = False  # whether a validation runs again in full after a resume
        self.batches_done: int | None = None  # those before the rest of a restored epoch, if Lightning's count is wrong
        self._trainer = trainer
        self._fit = fit
        self._random = Generators(trainer.strategy.root_device, {})
        self._passes: Passes | None = None
        self._why_not: str | None = None  # the reason why the loaders are not followed
        self._ranks: list[Any] = []  # the readings of all ranks in the checkpoint that was restored
        self._following: list[Following | None] | None = None  # how the loaders go on amid its epoch
        self._done = 0  # the batches that Lightning counts before those of the present passes
        self._before_validation: Any = None  # the states of the generators
        loop = trainer.fit_loop
        fit.undo.callback(self._close)
        fit.undo.callback(wrap_method(loop, "_load_combined_loader_states", self._follow))
        fit.undo.callback(wrap_method(loop, "on_advance_start", self._leave_rest))
        fit.undo.callback(wrap_method(loop.epoch_loop, "on_run_start", self._begin_passes))
        fit.undo.callback(wrap_method(loop.epoch_loop.val_loop, "run", self._validate))

    # -- the loaders --------------------------------------------------------------------------------------------------

    def _follow(self, original: Callable[[], None]) -> None:
        """Have the loaders followed that Lightning has just made."""
        trainer, loaders = self._trainer, self._trainer.fit_loop._combined_loader
        assert loaders is not None, "Lightning loads their states"
        self._close()  # of earlier ones, which are made anew
        self._why_not = _why_not_followed(trainer, loaders)
        if self._why_not is not None and self.strict:
            raise MisconfigurationException(f"{self.strict} cannot find its place in {self._why_not}.")
        if self._why_not is None:
            ranks, epochs = data_parallel(trainer)[1], self._epochs
            device = trainer.strategy.root_device
            self._passes = Passes(loaders, device, ranks, lambda: epochs.processed)
            self._random = self._passes.generators
        for loader in loaders.flattened:
            begin_epoch(trainer, loader)
        if self._resumes and self._knows_place:  # Lightning has the states of the first rank, also at an epoch's end
            states = [] if epoch_is_over(trainer) else _states(self._mine)
            trainer.fit_loop._combined_loader_states_to_load = states
        original()
        if self._resumes:
            self._plan()

    def _close(self) -> None:
        if self._passes is not None:
            self._passes.close()

    def _begin_passes(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Begin the passes of a resumed fit, which wait until its epoch begins; Lightning begins the others."""
        leave_last_batch(self._trainer)
        self._done = self._batches.ready
        passes = self._passes
        if passes is not None and not self._resumes:
            passes.blind = False  # in an epoch that begins anew
        if passes is not None and passes.waits:
            passes.waits = False
            if not self._trainer.fit_loop.epoch_loop._is_training_done:
                self._go_on(passes, fetcher)
        original(fetcher)

    def _go_on(self, passes: Passes, fetcher: Any) -> None:
        if self._following is None:
            iter(fetcher)
        else:
            passes.go_on(self._following, self._mine["random"][:-1], self._mine["used_up"])
            iter(fetcher)
            self._set_random(held=passes.are_as_far_ahead(self._mine["loaders"]))

    def _leave_rest(self, original: Callable[[], None]) -> None:
        """Give an epoch after one whose rest was dealt out anew the number of batches that its loaders have."""
        passes = self._passes
        follows = passes is not None and not passes.waits and passes.epoch != self._epochs.processed
        if passes is not None and passes.length is not None and follows:
            passes.length = None
            set_batches(self._trainer, len(passes.loaders))
        original()

    def _validate(self, original: Callable[[], Any]) -> Any:
        self._before_validation = self._random.state()
        return original()

    @property
    def _resumes(self) -> bool:
        """Whether a checkpoint was restored, whose epoch is not over yet."""
        return self._trainer.fit_loop.is_resuming and bool(self._trainer.ckpt_path)

    @property
    def _epochs(self) -> Any:
        return self._trainer.fit_loop.epoch_progress.current

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress.current

    # -- going on -----------------------------------------------------------------------------------------------------

    @property
    def _mine(self) -> Any:
        """What the checkpoint has of this rank, or of another one if it was not there or could not tell; or None."""
        rank = self._trainer.global_rank
        mine = self._ranks[rank] if rank < len(self._ranks) else None
        return mine or next(filter(None, self._ranks), None)

    @property
    def _knows_place(self) -> bool:
        """Whether the checkpoint has the place in the loaders."""
        return self._mine is not None and self._mine["loaders"] is not None

    @property
    def skips_batches(self) -> bool:
        """Whether the batches that a restored epoch has had are left out for its samplers."""
        return self._knows_place and self._why_not is None

    def load(self, saved: dict[str, Any] | None) -> None:
        """Take the reading of a checkpoint, if it has one."""
        self._ranks = saved["ranks"] if saved else []

    def _plan(self) -> None:
        """Find out how the loaders go on in a resumed fit, when it has made them."""
        mine, passes = self._mine, self._passes
        if passes is None or not self._knows_place:
            if not epoch_is_over(self._trainer):
                self._lose_place(self._why_not or "a checkpoint that was saved without it")
            return
        passes.waits = True
        if epoch_is_over(self._trainer):
            passes.renew(_states(mine))
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if mine["epoch"] != self._epochs.processed or progress.is_last_batch:
            return
        self._following = self._places(mine["loaders"])
        if any(how is not None and how.is_dealt_anew for how in self._following):
            self._deal_rest(passes, self._following, mine["used_up"])
        elif mine["length"] is not None:
            passes.length, self.batches_done = mine["length"], self._batches.processed

    def _lose_place(self, found: str) -> None:
        """Raise, or warn, that an epoch begins anew in its midst."""
        if self.strict:
            raise MisconfigurationException(
                f"{self.strict} cannot go on amid an epoch with {found}. Resume from a checkpoint of an epoch's end, or"
                f" without {self.strict}: Lightning begins the order of the epoch again."
            )
        rank_zero_warn(f"The epoch goes on with samples from the beginning of its order: its place is lost in {found}.")
        if self._passes is not None:
            self._passes.blind = True

    def _places(self, saved: list[Any]) -> list[Following | None]:
        """How each loader goes on.

        Raises:
            MisconfigurationException: If one cannot.
        """
        assert self._passes is not None, "the loaders are followed"
        tracks, loaders = self._passes.tracks, self._passes.loaders.flattened
        rank, ranks = data_parallel(self._trainer)
        before, now = (["state" in (one or ()) for one in saved], [track is None for track in tracks])
        if before != now:
            raise MisconfigurationException(
                f"The epoch that goes on began with {_counted(before)}, now {_counted(now)}: resume with the same"
                " loaders, or from a checkpoint of an epoch's end."
            )
        if any(now) and len(self._ranks) != self._trainer.world_size:
            self._lose_place(f"a loader with a state_dict, of {len(self._ranks)} processes")
        return [
            None if track is None or one is None else go_on(one, loader, ranks, rank, self._epochs.processed)
            for one, track, loader in zip(saved, tracks, loaders, strict=True)
        ]

    def _deal_rest(self, passes: Passes, following: list[Following | None], used_up: list[bool]) -> None:
        """Let the epoch have the batches that the rest of its samples makes.

        Lightning counts those before it so that the plan has the steps that are left, and windows of accumulated
        batches begin with it.
        """
        if hasattr(self._batches, "orders"):  # of a FitSampler, that of the whole epoch
            self._batches.orders = {}
        loaders, counted = passes.loaders, min if passes.loaders._mode == "min_size" else max
        lengths: list[Any] = [sized_len(loader) for loader in loaders.flattened]
        if None in lengths:
            return
        left = [how.left(length) if how else length for length, how in zip(lengths, following, strict=True)]
        rest = counted([n for n, used in zip_longest(left, used_up) if not used] or left)
        whole, limited = counted(lengths), counted(map(min, lengths, loaders.limits))
        window = self._trainer.accumulate_grad_batches
        done = (math.ceil(whole / window) - math.ceil(rest / window)) * window
        if limited < whole:
            done = self._fit.rescaled(self._fit.place, limited)
            rest = min(rest, limited - done)
        passes.length, self.batches_done = done + rest, done

    def began(self) -> None:
        """Set the random generators, after all hooks that run at the start of a fit only."""
        if self._resumes and self._mine is not None:
            self._set_random()
            if self._passes is not None and self._following is None:
                self._passes.begin_between(self._mine["between"])

    def _set_random(self, *, held: bool = True) -> None:
        self._random.load(self._mine["random"][-1], held=held)
        rank = self._trainer.global_rank
        if rank >= len(self._ranks) or self._ranks[rank] is None:
            self._random.reseed(rank)

    def numbers(self) -> Any:
        """The numbers of the samples in the batch that Lightning has taken last, as the only sampler gave them.

        To be called before Lightning counts it, while it goes to the device. None if they are not known.
        """
        return None if self._passes is None else self._passes.numbers(self._batches.ready - self._done)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any] | None:
        """The reading of all ranks, as plain values; they take part, unless an error has come between them."""
        passes = self._passes
        if passes is not None and passes.blind:
            return None
        if passes is not None and passes.waits:
            return {"ranks": self._ranks}
        world, mine = self._trainer.world_size, self._state()
        ranks: list[Any] = [None] * world
        ranks[self._trainer.global_rank] = mine
        if world > 1 and dist.is_initialized() and sys.exc_info()[0] is None:
            dist.all_gather_object(ranks, mine)
        return {"ranks": ranks}

    def _state(self) -> dict[str, Any]:
        passes = self._passes
        if passes is None:
            return {"random": [plain(self._random.state())], "loaders": None, "between": [], "epoch": None}
        moments = self._moments(passes)
        random = [plain(moment.random) for moment in moments]
        if self.repeats_validation:
            random[-1] = plain(self._before_validation)
        return {
            "random": random,
            "loaders": passes.saved(moments[0]),
            "used_up": moments[0].used_up,
            "between": [track and track.between_passes() for track in passes.tracks],
            "epoch": passes.epoch,
            "length": passes.length,
        }

    def _moments(self, passes: Passes) -> list[Moment]:
        """The moments before the batches that a resumed fit fetches until its first step, and that before the next."""
        begun = self._epochs.started > self._epochs.processed or passes.epoch != self._epochs.processed
        number = self._batches.processed - self._done if begun else 0  # the count may be that of an earlier epoch
        number = min(max(number, passes.fetched - KEPT), passes.fetched)
        fetcher = self._trainer.fit_loop._data_fetcher
        ahead = isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None and fetcher.prefetch_batches
        return [passes.moment(each) for each in range(number, min(number + ahead, passes.fetched) + 1)]


def follow_reading(trainer: L.Trainer, strict: str | None) -> Reading:
    """Have the present fit's reading of its loaders saved, and gone on with exactly; the first call does it.

    Args:
        trainer: The Trainer, in ``setup`` of a fit.
        strict: The name of the trick that promises it, and so raises where it is not possible; None to warn.
    """
    fit = fit_of(trainer)
    if fit.reading_ended:
        fit.reading, fit.reading_ended = Reading(trainer, fit), False
    fit.reading.strict = fit.reading.strict or strict
    return fit.reading


def _why_not_followed(trainer: L.Trainer, loaders: Any) -> str | None:
    if takes_dataloader_iter(trainer.lightning_module):
        name = type(trainer.lightning_module).__name__
        return f"{name}.training_step(dataloader_iter), which fetches batches itself. Let it take a batch"
    return next(filter(None, map(why_not_followed, loaders.flattened)), None)


def _states(mine: dict[str, Any] | None) -> list[Any]:
    """The states of the loaders that tell theirs themselves."""
    loaders = mine["loaders"] if mine is not None else None
    return [loader["state"] for loader in loaders or [] if loader and "state" in loader]


def _counted(tells: list[bool]) -> str:
    return f"{len(tells)} loaders, {sum(tells)} with a state_dict"
