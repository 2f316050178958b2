"""The base class of callbacks that mix samples: partners, weights, and the plan for the losses."""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.callback import BatchCallback
from lightning_tricks.core.batches.cutting import (
    has_entries_for_pairs,
    has_one_entry_a_sample,
    is_pairwise,
    is_symmetric,
)
from lightning_tricks.core.batches.paths import (
    INPUTS,
    Path,
    described,
    get,
    is_attention_mask,
    is_read_only,
    locate,
    other_samples,
    spelled,
    walk_around,
)
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_range
from lightning_tricks.core.mixed_targets.unmixed import Unmixed


@dataclass(frozen=True)
class Drawn:
    """The random numbers of a batch: the weight of a sample itself (a number or (B,)), and its partner's index (B,)."""

    lam: float | Tensor
    index: Tensor


class MixingCallback(BatchCallback):
    """Mixes every sample of a batch with another one, and their losses by the same weights."""

    alpha: float
    prob: float
    mixes_inputs = True  # False where a layer's input is mixed instead (HiddenMixup)

    def __init__(self) -> None:
        check_range("alpha", self.alpha, 0.0, 1e6)
        check_range("prob", self.prob, 0.0, 1.0)
        super().__init__()
        self.drawn: Drawn | None = None  # the random numbers of the last batch; None if it was not mixed
        # The layout of the last batch; None if the next batch must be checked.
        self._layout: tuple[Any, ...] | None = None
        self._features: set[Path] = set()  # paths of parts on a device that have no entries for pairs of samples
        self._size = 0  # number of samples of the last batch
        self._known: dict[str, list[Path]] = {}  # paths of the last batch's inputs and targets

    @abstractmethod
    def _mix(self, context: BatchContext, lam: float, size: int) -> Drawn:
        """Mix the samples of a checked batch, with ``lam`` from ``Beta(alpha, alpha)``."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._layout, self._features = None, set()  # The first batch of a fit is checked.

    @override
    def _begin(self) -> None:
        self.drawn = None

    @override
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        if self.alpha == 0:
            return
        lam = context.numbers.betavariate(self.alpha, self.alpha)
        self.drawn = self._mix(context, lam, self._checked(context))
        if labels := self._labels(context):
            context.plan.lam, context.partners = self.drawn.lam, self.drawn.index
            context.mix_targets(self, labels)

    @override
    def _check(self, trainer: L.Trainer, context: BatchContext) -> None:
        if self.alpha and self.prob:
            self._checked(context)
            context.plan_targets(self, self._labels(context))

    def _checked(self, context: BatchContext) -> int:
        """The number of samples of a batch, after checking its parts; a batch like the last one needs no check."""
        layout = _layout(context.batch)
        if layout is None or layout != self._layout:
            self._layout, self._known = None, {}
            self._size = self._samples(context.batch, paths=self._paths(context, "target"))
            self._watch(context, self._size)
            self._require_parts(context, self._size)
            self._layout = None if context.unmixed else layout
        return self._size

    def _require_parts(self, context: BatchContext, size: int) -> None:
        """Raise for a batch that cannot be mixed."""
        self._inputs(context, size)

    def _paths(self, context: BatchContext, argument: str) -> list[Path]:
        """The paths of the inputs or the targets, which mixing does not change."""
        if argument not in self._known:
            find = self.inputs_in if argument == "inputs" else self.targets_in
            self._known[argument] = find(context.batch)
        return self._known[argument]

    def _labels(self, context: BatchContext) -> list[Path]:
        """The targets whose losses are mixed."""
        return self._paths(context, "target")

    def _inputs(self, context: BatchContext, size: int) -> list[tuple[Path, Tensor]]:
        """The inputs of a batch with their paths, after checking them."""
        inputs = [(path, get(context.batch, path)) for path in self._paths(context, "inputs")]
        targets = [get(context.batch, path) for path in self._paths(context, "target")]
        others = _other_samples(context.batch, self._paths(context, "target"))
        for path, x in inputs:
            if any(path[: len(other)] == other for other in others):
                raise self._cannot(
                    f"mixes inputs and targets of the same samples, got {spelled(path)} beside"
                    f" {' and '.join(map(spelled, self._paths(context, 'target')))}, which may be those of others: name"
                    " inputs= and target= in the same part of the batch",
                    context,
                )
            if any(x is target for target in targets):
                raise self._cannot(f"needs a target that is not an input, got {path} for both", context)
            if not (x.is_floating_point() or x.is_complex()):
                name = ".".join(map(str, path))
                raise self._cannot(
                    f"mixes floating-point inputs, got {x.dtype} for {name!r}: convert it in the data set or, on the"
                    " device, in on_after_batch_transfer, or use HiddenMixup for token ids",
                    context,
                )
            if x.is_nested or not x.ndim or len(x) != size:
                shape = "nested" if x.is_nested else tuple(x.shape)
                raise self._cannot(
                    f"needs an input and a target for each sample, got inputs {shape} and {size} targets", context
                )
        return inputs

    def _watch(self, context: BatchContext, size: int) -> None:
        """Find the parts that have one entry per sample, and are neither mixed nor targets."""
        batch, targets = context.batch, self._paths(context, "target")
        inputs = locate(batch, self.inputs, INPUTS, 0)
        rest = []
        for path, part in walk_around(batch, targets):
            if (self.mixes_inputs or path in targets) and self._is_pairwise(path, part, size):
                raise self._cannot(f"cannot mix {spelled(path)}, which has entries for pairs of samples", context)
            if path not in inputs and path not in targets:
                rest.append((path, part))
        if not rest:  # as in most batches
            return
        others, own = _other_samples(batch, targets), [_by_name(batch, path) for path in (*inputs, *targets)]
        for path, part in rest:
            if _by_name(batch, path) in own or any(path[: len(other)] == other for other in others):
                continue
            if not _has_samples(batch, path, size):
                continue
            # What a network sees would interrupt its compiled code, and need not be mixed where a layer is.
            if not self.mixes_inputs and not _may_be_label(path, part, [get(batch, target) for target in targets]):
                continue
            context.unmixed[path] = Unmixed(
                trick=type(self).__name__,
                path=spelled(path),
                name=_named(path),
                inputs=tuple(map(_named, inputs)),
                targets=tuple(map(_named, targets)),
                in_network=self.mixes_inputs
                and self.inputs is None
                and part.is_floating_point()
                and not is_attention_mask(path),
            )

    def _is_pairwise(self, path: Path, part: Any, size: int) -> bool:
        """Whether a part has entries for pairs of samples; what was not symmetric once makes no device wait again."""
        if not isinstance(part, Tensor) or not has_entries_for_pairs(part, size) or path in self._features:
            return False
        if is_symmetric(part):
            return is_pairwise(part, size)
        if not part.is_cpu:
            self._features.add(path)
        return False

    def _cannot(self, rule: str, context: BatchContext) -> MisconfigurationException:
        return MisconfigurationException(f"{type(self).__name__} {rule}. The batch has {described(context.batch)}.")


def _layout(batch: Any) -> tuple[Any, ...] | None:
    """The shapes and dtypes of a tuple or list of tensors, if nothing but those decides whether it can be mixed."""
    if type(batch) not in (tuple, list) or any([type(part) is not Tensor for part in batch]):
        return None
    if any([part.is_nested or part.layout is not torch.strided for part in batch]):
        return None
    shapes = [part.shape for part in batch]
    if len(set(map(id, batch))) < len(batch) or any([len(shape) > 1 and shape[0] == shape[1] for shape in shapes]):
        return None  # one tensor twice, or entries for pairs of samples
    return type(batch), *shapes, *[part.dtype for part in batch]


def _other_samples(batch: Any, targets: list[Path]) -> list[Path]:
    """The containers of samples that none of the targets belongs to."""
    found = [other for target in targets for other in other_samples(batch, target)]
    return [other for other in found if not any(target[: len(other)] == other for target in targets)]


def _by_name(batch: Any, path: Path) -> Path:
    """A path with the names of fields in place of positions in named tuples."""
    fields = [getattr(get(batch, path[:depth]), "_fields", None) for depth in range(len(path))]
    return tuple(
        names[step] if names and isinstance(step, int) else step for names, step in zip(fields, path, strict=True)
    )


def _named(path: Path) -> str:
    return ".".join(map(str, path))


def _has_samples(batch: Any, path: Path, size: int) -> bool:
    """Whether a part is a plain tensor with one entry per sample, or one of as many tensors in a list."""
    part, holders = get(batch, path), [get(batch, path[:depth]) for depth in range(len(path))]
    if type(part) is not Tensor or part.is_nested or part.layout != torch.strided or not part.ndim:
        return False
    if not holders or any(is_read_only(holder) for holder in holders):
        return False
    return len(part) == size or has_one_entry_a_sample(holders[-1], size)


_LABEL = re.compile(r"(^|_)(label|target|tag|class)(e?s)?(_|$)", re.IGNORECASE)
_TOKENS = re.compile(r"(^|_)(ids|mask)$", re.IGNORECASE)


def _may_be_label(path: Path, part: Tensor, targets: list[Tensor]) -> bool:
    """Whether a part may be a second label, a weight or a length, and not what a network sees, such as tokens.

    A label has one number for each sample, or as many as the target, or is called one.
    """
    name = str(path[-1])
    if is_attention_mask(path) or name.lower() in INPUTS:
        return False
    if part.is_floating_point() or part.numel() == len(part) or _LABEL.search(name):
        return True
    return not _TOKENS.search(name) and any(part.shape == target.shape for target in targets)


def permutation(numbers: random.Random, like: Tensor) -> Tensor:
    """A random permutation (B,): the index of every sample's partner."""
    generator = torch.Generator().manual_seed(numbers.getrandbits(63))
    return torch.randperm(len(like), generator=generator).to(like.device, non_blocking=True)
