"""The samples that an interrupted epoch has left, and their batches on other ranks or of another size."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from lightning_tricks.core.lightning.fit_sampler import CHECKSUM, BucketSampler, FitSampler
from lightning_tricks.core.lightning.loaders import ResizableBatches

SEQUENTIAL, SHUFFLED, DISTRIBUTED, OTHER = "sequential", "shuffled", "distributed", "other"
PLAIN = (SEQUENTIAL, SHUFFLED, DISTRIBUTED)

Part = dict[str, Any]  # plain values, which are in checkpoints


class Following(NamedTuple):
    """How the next pass over a loader begins, where it is not as any other.

    Args:
        part: The description of its samples; None for that which they have when it begins.
        saved: The saved pass that it goes on in.
        rest: The numbers of the samples, batch by batch, in place of those that the samplers give.
        workers: The workers that have stayed from an earlier pass: the states in which they are, and in which the
            samplers were when they were started.
    """

    part: Part | None = None
    saved: dict[str, Any] | None = None
    rest: list[Any] | None = None
    workers: dict[str, Any] | None = None

    @property
    def is_dealt_anew(self) -> bool:
        """Whether the samples that are left are in other batches than they would have been."""
        return self.saved is None and self.rest is not None

    def left(self, length: int) -> int:
        """The number of batches that are left, of a loader that has so many."""
        whole = length if self.rest is None else len(self.rest)
        return whole - (self.saved["batches"] if self.saved else 0)


def describe(loader: Any, ranks: int, epoch: int) -> Part:
    """The samples of a loader and how they become batches.

    Returns:
        The name of the sampler in errors, its kind, the number of samples, the number of ranks that share them, the
        size of a batch (None where the loader makes none), whether an incomplete batch is dropped, the epoch, and the
        settings on which the order depends besides it.
    """
    sampler, batches = _sampler(loader), loader.batch_sampler
    kind, settings, samples = OTHER, {}, getattr(loader.dataset, "__len__", lambda: None)()
    if isinstance(sampler, FitSampler):
        kind, settings = type(sampler).__name__, sampler.order_settings()
    elif type(sampler) is DistributedSampler:
        kind, ranks = DISTRIBUTED, sampler.num_replicas
        settings = {name: getattr(sampler, name) for name in ("shuffle", "seed", "drop_last")}
    elif ranks == 1 and type(sampler) is SequentialSampler:
        kind = SEQUENTIAL
    elif ranks == 1 and type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == samples:
        kind = SHUFFLED
    cut = None if sampler is batches else batches
    return {
        "name": type(sampler).__name__,
        "kind": kind,
        "samples": samples,
        "ranks": ranks,
        "batch_size": None if cut is None else cut.batch_size,
        "drop_last": cut is not None and cut.drop_last,
        "settings": settings,
        "epoch": epoch,
        "rest_of": None,
    }


def _sampler(loader: Any) -> Any:
    """What gives a loader the order: the sampler inside torch's batch sampler, or the user's batch sampler."""
    batches = loader.batch_sampler
    if type(batches) in (BatchSampler, ResizableBatches):
        return batches.sampler
    return loader.sampler if batches is None else batches


def go_on(saved: dict[str, Any], loader: Any, ranks: int, rank: int, epoch: int) -> Following:
    """How the pass over a loader goes on where a saved one was.

    Args:
        saved: The saved pass.
        loader: The loader, with the settings of now.
        ranks: The number of ranks that share the samples.
        rank: The number of this one.
        epoch: The epoch.

    Raises:
        MisconfigurationException: If the settings are others, and the samples that are left are not known.
    """
    sampler, before, part = _sampler(loader), saved["part"], describe(loader, ranks, epoch)
    rank = sampler.rank if part["kind"] == DISTRIBUTED else rank
    if not differences(before, part):
        rest_of = before["rest_of"]
        return Following(before, saved, rest_of and batches_of(before, samples_left(rest_of, sampler), sampler, rank))
    if not saved["batches"] and before["rest_of"] is None:
        return Following()
    require_known_rest(before, part)
    states = {"first": saved["states"]["first"]}
    part["rest_of"] = {"part": before, "batches": saved["batches"], "states": states}
    return Following(part, None, batches_of(part, samples_left(saved, sampler), sampler, rank))


def differences(before: Part, now: Part) -> list[str]:
    """What differs between two descriptions, in words of a user."""
    words = {"name": "sampler", "samples": "samples", "ranks": "ranks", "batch_size": "batch_size"}
    pairs = {words.get(key, key): (before[key], now[key]) for key in (*words, "drop_last")}
    if before["kind"] == now["kind"]:
        names = {**before["settings"], **now["settings"]}
        pairs |= {name: (before["settings"].get(name), now["settings"].get(name)) for name in names}
    return [f"{name} was {was!r}, now {is_!r}" for name, (was, is_) in pairs.items() if was != is_]


def require_known_rest(before: Part, now: Part) -> None:
    """Raise unless the samples that are left are known, and can be dealt out anew.

    Raises:
        MisconfigurationException: If the samples are unknown, or cannot be dealt out anew.
    """
    known = before["kind"] in PLAIN and now["kind"] in PLAIN
    same = before["kind"] == now["kind"] != OTHER and _checksum(before) == _checksum(now)
    if before["samples"] == now["samples"] and (known or same):
        return
    raise MisconfigurationException(
        f"The epoch that goes on began otherwise: {'; '.join(differences(before, now))}. Which samples are left is"
        " known for all samples in order, shuffled without replacement, of a DistributedSampler, LengthBuckets or"
        f" TokenBuckets, and the same number of them; got {before['name']}. Resume with those settings, or from a"
        " checkpoint of an epoch's end."
    )


def _checksum(part: Part) -> Any:
    return next((value for name, value in part["settings"].items() if name.startswith(CHECKSUM)), None)


def samples_left(turn: dict[str, Any], sampler: Any) -> Tensor:
    """The samples of all ranks after the first batches of a saved pass, in their order.

    Each comes once, but where a weighted sampler has drawn it again.

    Args:
        turn: The saved pass: its ``part``, the number of ``batches`` that it has had, the ``states``.
        sampler: The present sampler, which has the lengths or weights of the samples.
    """
    part, batches = turn["part"], turn["batches"]
    whole = None if part["rest_of"] is None else samples_left(part["rest_of"], sampler)
    if not isinstance(sampler, BucketSampler):
        order = _order(turn, sampler) if whole is None else whole
        return order[batches * (part["batch_size"] or 1) * part["ranks"] :]
    ids = torch.arange(part["samples"], device="cpu") if whole is None else whole
    cut = [ids[batch] for batch in _buckets(part, sampler, ids)] if len(ids) else []
    seen = torch.zeros(part["samples"], dtype=torch.bool, device="cpu")
    seen[torch.cat([ids[:0], *cut[: batches * part["ranks"]]])] = True
    return ids[~seen[ids]]


def batches_of(part: Part, left: Tensor, sampler: Any, rank: int) -> list[Any]:
    """The batches that a rank makes of the samples that are left; all ranks get the same number of them.

    Where the sampler does not drop the samples that do not fill all ranks, it gives some of them twice, as in any other
    epoch. What would be dropped as a whole is one batch, since Lightning goes on amid an epoch with a batch at least.
    """
    ranks, size, settings = part["ranks"], part["batch_size"], part["settings"]
    left = left if len(left) else torch.arange(1, device="cpu")
    if isinstance(sampler, BucketSampler):
        cut = _buckets(part, sampler, left) or _buckets(
            {**part, "settings": {**settings, "drop_last": False}}, sampler, left
        )
        return [left[batch].tolist() for batch in cut[rank::ranks]]
    count = len(left) // ranks if settings.get("drop_last") else math.ceil(len(left) / ranks)
    batch = size or 1
    if not count or (part["drop_last"] and count < batch):
        count = batch
    filled = left.repeat(math.ceil(count * ranks / len(left)))[: count * ranks]
    mine: list[int] = filled[rank::ranks].tolist()
    if size is None:
        return mine
    end = count // size * size if part["drop_last"] else count
    return [mine[first : first + size] for first in range(0, end, size)]


def _order(turn: dict[str, Any], sampler: Any) -> Tensor:
    """The order of all samples in the epoch, each once, or as often as a weighted sampler has drawn it."""
    part = turn["part"]
    if part["kind"] not in PLAIN:
        weighted: Tensor = sampler.order_of(part["settings"], part["epoch"], part["ranks"])
        return weighted
    if part["kind"] == SHUFFLED:
        drawn = turn["states"]["first"]
        generators = [state for path, state in drawn["own"].items() if path.endswith("sampler.generator")]
        with torch.random.fork_rng(devices=[]):
            if drawn["random"] is not None:
                torch.set_rng_state(drawn["random"]["torch"])
            own = torch.Generator() if generators else None
            if own is not None:
                own.set_state(generators[0])
            return torch.tensor(list(RandomSampler(range(part["samples"]), generator=own)), device="cpu")
    if part["kind"] == SEQUENTIAL or not part["settings"]["shuffle"]:
        order = torch.arange(part["samples"], device="cpu")
    else:
        generator = torch.Generator().manual_seed(part["settings"]["seed"] + part["epoch"])
        order = torch.randperm(part["samples"], generator=generator)
    dropped = part["samples"] % part["ranks"] if part["settings"].get("drop_last") else 0
    return order[: part["samples"] - dropped]


def _buckets(part: Part, sampler: BucketSampler, samples: Tensor) -> list[Tensor]:
    """The positions in ``samples`` of each batch of all ranks."""
    return sampler.of_samples(samples, part["settings"]).batches_of_ranks(part["epoch"], part["ranks"])
