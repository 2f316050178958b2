"""The base class of callbacks that mix samples: partners, weights, and the plan for the losses."""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.callback import BatchCallback
from lightning_tricks.core.batches.paths import Path, described, get
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_range


@dataclass(frozen=True)
class Drawn:
    """The random numbers of a batch: the weight of a sample itself (a number or (B,)), and its partner's index (B,)."""

    lam: float | Tensor
    index: Tensor


class MixingCallback(BatchCallback):
    """Mixes every sample of a batch with another one, and their losses by the same weights."""

    alpha: float
    prob: float

    def __init__(self) -> None:
        check_range("alpha", self.alpha, 0.0, 1e6)
        check_range("prob", self.prob, 0.0, 1.0)
        super().__init__()
        self.drawn: Drawn | None = None  # the random numbers of the last batch; None if it was not mixed

    @abstractmethod
    def _mix(self, context: BatchContext, lam: float, size: int) -> Drawn:
        """Mix the samples of a batch, with ``lam`` from ``Beta(alpha, alpha)``."""

    @override
    def _begin(self) -> None:
        self.drawn = None

    @override
    def _change(self, trainer: pl.Trainer, context: BatchContext) -> None:
        if self.alpha == 0:
            return
        lam = context.numbers.betavariate(self.alpha, self.alpha)
        self.drawn = self._mix(context, lam, self._samples(context.batch))
        if labels := self._labels(context.batch):
            context.plan.lam, context.partners = self.drawn.lam, self.drawn.index
            context.mix_targets(self, labels)

    @override
    def _check(self, trainer: pl.Trainer, context: BatchContext) -> None:
        if self.alpha and self.prob:
            self._require_parts(context, self._samples(context.batch))
            context.plan_targets(self, self._labels(context.batch))

    def _require_parts(self, context: BatchContext, size: int) -> None:
        """Raise for a batch that cannot be mixed."""
        self._inputs(context, size)

    def _labels(self, batch: Any) -> list[Path]:
        """The targets whose losses are mixed."""
        return self.targets_in(batch)

    def _inputs(self, context: BatchContext, size: int) -> list[tuple[Path, Tensor]]:
        """The inputs of a batch with their paths, after checking them."""
        inputs = [(path, get(context.batch, path)) for path in self.inputs_in(context.batch)]
        targets = [get(context.batch, path) for path in self.targets_in(context.batch)]
        for path, x in inputs:
            if any(x is target for target in targets):
                raise self._cannot(f"needs a target that is not an input, got {path} for both", context)
            if not (x.is_floating_point() or x.is_complex()):
                name = ".".join(map(str, path))
                raise self._cannot(
                    f"mixes floating-point inputs, got {x.dtype} for {name!r}: convert it in the data set, or use"
                    " HiddenMixup for token ids",
                    context,
                )
            if x.is_nested or not x.ndim or len(x) != size:
                shape = "nested" if x.is_nested else tuple(x.shape)
                raise self._cannot(
                    f"needs an input and a target for each sample, got inputs {shape} and {size} targets",
                    context,
                )
        return inputs

    def _cannot(self, rule: str, context: BatchContext) -> MisconfigurationException:
        return MisconfigurationException(f"{type(self).__name__} {rule}. The batch has {described(context.batch)}.")


def permutation(numbers: random.Random, like: Tensor) -> Tensor:
    """A random permutation (B,): the index of every sample's partner."""
    generator = torch.Generator().manual_seed(numbers.getrandbits(63))
    return torch.randperm(len(like), generator=generator).to(like.device, non_blocking=True)
