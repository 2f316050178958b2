"""Between the loader and the training step: where callbacks change the batches that a module trains on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.batches.paths import Path, get, put, spelled
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import transfers_batch
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.target import mixed_target

if TYPE_CHECKING:
    from lightning_tricks.core.batches.callback import BatchCallback


class BatchContext:
    """A batch on its way to the module, and what is to become of its losses.

    Args:
        batch: As it came from the transfer to the device.
        number: Of the batch in this training, from 0.
        numbers: Random numbers of this batch on this rank.
    """

    def __init__(self, batch: Any, number: int, numbers: random.Random) -> None:
        self.batch = batch
        self.number = number
        self.numbers = numbers
        self.plan = LossPlan()
        self.partners: Tensor | None = None  # the sample that each sample is mixed with
        self.targets: dict[Path, str] = {}  # those that compute the loss by the plan, and who asked for it
        self._mixed: set[Path] = set()  # those of them that are mixed with their partners'

    def plan_targets(self, callback: BatchCallback, paths: Sequence[Path]) -> None:
        """Have targets compute the loss by the plan."""
        self.targets |= dict.fromkeys(paths, type(callback).__name__)

    def mix_targets(self, callback: BatchCallback, paths: Sequence[Path]) -> None:
        """Have targets compute the loss by the plan, and mix it with that of their partners."""
        self.plan_targets(callback, paths)
        self._mixed.update(paths)

    def finished(self) -> Any:
        """The batch as the module gets it."""
        self.plan.tricks, self.plan.number = " and ".join(dict.fromkeys(self.targets.values())), self.number
        second = self.partners is not None and not isinstance(self.plan.lam, Tensor) and self.plan.lam < 0.5
        if second:  # then it is the second label that the target looks like
            self.plan.lam = 1 - self.plan.lam
        for path in self.targets:
            target = get(self.batch, path)
            branches = [target]
            if self.partners is not None:
                branches.append(target.index_select(0, self.partners) if path in self._mixed else target)
            branches = branches[::-1] if second else branches
            self.batch = put(self.batch, path, mixed_target(branches, self.plan))
        return self.batch


class BatchPipeline:
    """Behind the strategy's transfer of batches to the device, for all callbacks of a Trainer.

    The random numbers of a batch depend on a seed (that of ``seed_everything``), the number of the batch in this
    training and the rank.
    """

    def __init__(self, trainer: pl.Trainer, callbacks: Sequence[BatchCallback]) -> None:
        self.seed: int = trainer.strategy.broadcast(torch.initial_seed())
        self.descends = False  # whether the step on the last batch came to a backward pass
        self._steps = 0  # before that
        self._checked = False  # whether the first batch of the training was checked for all callbacks
        self._callbacks = sorted(callbacks, key=lambda each: each.state_key)  # whatever order the Trainer has them in
        self._context: BatchContext | None = None
        self._undo = ExitStack()
        self._undo.callback(wrap_method(trainer.strategy, "batch_to_device", partial(self._transferred, trainer)))

    def _transferred(self, trainer: pl.Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        if not transfers_batch(trainer):
            return batch
        self.drop()
        for each in self._callbacks:
            each._begin()
        # no gradients are taken where batches are read for another purpose, such as the statistics of BatchNorm
        if batch is None or not trainer.training or not torch.is_grad_enabled():
            return batch
        active = [callback for callback in self._callbacks if callback._is_active(trainer)]
        number = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
        context = BatchContext(batch, number, self._numbers(trainer, number))
        changing = chosen(active, context.numbers)
        for callback in changing:
            callback._change(trainer, context)
        if not self._checked:  # what cannot be changed later is refused now
            for callback in self._callbacks:
                if callback not in changing:
                    callback._check(trainer, context)
            self._checked = True
        self._context, self.descends, self._steps = context, False, trainer.global_step
        return context.finished()

    def _numbers(self, trainer: pl.Trainer, number: int) -> random.Random:
        ranks = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        key = f"{self.seed} {number * ranks['num_replicas'] + ranks['rank']}"
        return random.Random(hashlib.blake2b(key.encode(), digest_size=16).digest())

    def finish(self, trainer: pl.Trainer) -> None:
        """End the work on a batch.

        Raises:
            MisconfigurationException: If no loss was computed by the plan, though there was a backward pass.
        """
        by_hand = not trainer.lightning_module.automatic_optimization and trainer.global_step > self._steps
        if self.descends or by_hand:  # by hand may be loss.backward(), which calls no hook
            self.require_loss(trainer)
        self.drop()

    def require_loss(self, trainer: pl.Trainer) -> None:
        """Raise unless a loss of the batch was computed by the plan.

        Raises:
            MisconfigurationException: If none was.
        """
        context, module = self._context, trainer.lightning_module
        if context is None or not context.targets or context.plan.losses:
            return
        if context.plan.unclear:
            raise context.plan.unclear_loss(context.plan.unclear)
        where = ", ".join(map(spelled, context.targets))
        tricks = context.plan.tricks
        raise MisconfigurationException(
            f"{tricks} did nothing to batch {context.number}: no loss of"
            f" {type(module).__name__}.training_step was computed from the target, {where}. Looked for was a loss of"
            " torch.nn.functional, or anything else made of that very tensor, that depends on the weights: not of a"
            " copy through NumPy or Python numbers, an autograd.Function or a compiled extension. Name another target="
            f" or compute the loss from it; where a library computes the loss, leave {tricks} out."
        )

    def drop(self) -> None:
        """Let the targets of the last batch be plain."""
        if self._context is not None:
            self._context.plan.open = False
            self._context = None

    def close(self) -> None:
        """Leave the strategy as it was."""
        self.drop()
        self._undo.close()


def chosen(callbacks: Sequence[BatchCallback], numbers: random.Random) -> list[BatchCallback]:
    """Those without a ``prob``, and behind them at most one of the others.

    Probabilities that sum to more than 1 are divided by their sum.
    """
    always = sorted((each for each in callbacks if each.prob is None), key=lambda each: each.order)
    left = numbers.random() * max(1.0, sum(each.prob or 0.0 for each in callbacks))
    for each in callbacks:
        left -= each.prob or 0.0
        if left < 0:
            return [*always, each]
    return always
