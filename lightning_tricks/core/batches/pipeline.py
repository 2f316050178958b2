"""The pipeline between the loader and the training step, in which callbacks change training batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.batches.form import require_no_attributes
from lightning_tricks.core.batches.paths import Path, get, put, spelled
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import data_parallel, transfers_batch
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.target import mixed_target, returned_loss
from lightning_tricks.core.mixed_targets.unmixed import Unmixed, unmixed_part

if TYPE_CHECKING:
    from lightning_tricks.core.batches.callback import BatchCallback


class BatchContext:
    """A batch on its way to the module, and the plan for its losses.

    Args:
        batch: The batch on the device.
        number: The number of the batch in this training, from 0.
        numbers: The generator of this batch's random numbers on this rank.
    """

    def __init__(self, batch: Any, number: int, numbers: random.Random) -> None:
        self.batch = batch
        self.number = number
        self.numbers = numbers
        self.plan = LossPlan()
        self.partners: Tensor | None = None  # the sample that each sample is mixed with
        self.targets: dict[Path, str] = {}  # targets whose losses follow the plan, and the trick that asked for it
        self.unmixed: dict[Path, Unmixed] = {}  # parts that belong to samples, and are neither mixed nor targets
        self._mixed: set[Path] = set()  # targets that are also mixed with those of their partners

    def plan_targets(self, callback: BatchCallback, paths: Sequence[Path]) -> None:
        """Let the losses of targets follow the plan."""
        trick = type(callback).__name__
        for path in paths:
            require_no_attributes(get(self.batch, path), spelled(path), trick)
        self.plan.only_looks = callback.only_looks and (not self.targets or self.plan.only_looks)
        self.targets |= dict.fromkeys(paths, trick)

    def mix_targets(self, callback: BatchCallback, paths: Sequence[Path]) -> None:
        """Let the losses of targets follow the plan, mixed with those of their partners."""
        self.plan_targets(callback, paths)
        self._mixed.update(paths)

    def finished(self) -> Any:
        """The batch for the module, with its targets replaced."""
        tricks = [*self.targets.values(), *(about.trick for about in self.unmixed.values())]
        self.plan.tricks, self.plan.number = " and ".join(dict.fromkeys(tricks)), self.number
        second = self.partners is not None and not isinstance(self.plan.lam, Tensor) and self.plan.lam < 0.5
        if second:  # the target looks like the label with the larger weight
            self.plan.lam = 1 - self.plan.lam
        for path in self.targets:
            target = get(self.batch, path)
            branches = [target]
            if self.partners is not None:
                branches.append(target.index_select(0, self.partners) if path in self._mixed else target)
            branches = branches[::-1] if second else branches
            self.batch = put(self.batch, path, mixed_target(branches, self.plan))
        for path, about in self.unmixed.items():
            self.batch = put(self.batch, path, unmixed_part(get(self.batch, path), self.plan, about))
        return self.batch


class BatchPipeline:
    """Runs after the strategy's transfer of batches to the device, for all batch callbacks of a Trainer.

    The random numbers of a batch depend on a seed (that of ``seed_everything``), the number of the batch in this
    training and the rank among the processes with other samples.
    """

    def __init__(self, trainer: L.Trainer, callbacks: Sequence[BatchCallback]) -> None:
        self.seed: int = trainer.strategy.broadcast(torch.initial_seed())
        self.descends = False  # whether the last batch had a backward pass
        self._steps = 0  # global_step before the last batch
        self._checked = False  # whether the first batch of the training was checked for all callbacks
        # The order in the Trainer must not matter.
        self._callbacks = sorted(callbacks, key=lambda callback: callback.state_key)
        self._context: BatchContext | None = None
        self._undo = ExitStack()
        for name, wrapper in (("batch_to_device", self._transferred), ("training_step", self._stepped)):
            self._undo.callback(wrap_method(trainer.strategy, name, partial(wrapper, trainer)))

    def _transferred(self, trainer: L.Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        if not transfers_batch(trainer):
            return batch
        self.drop()
        for callback in self._callbacks:
            callback._begin()
        # without gradients, batches are read for another purpose, such as the statistics of BatchNorm
        if batch is None or not trainer.training or not torch.is_grad_enabled():
            return batch
        active = [callback for callback in self._callbacks if callback._is_active(trainer)]
        number = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
        context = BatchContext(batch, number, self._numbers(trainer, number))
        changing = chosen(active, context.numbers)
        for callback in changing:
            callback._change(trainer, context)
        if not self._checked:  # a batch that could not be changed later is refused at once
            for callback in self._callbacks:
                if callback not in changing:
                    callback._check(trainer, context)
            self._checked = True
        self._context, self.descends, self._steps = context, False, trainer.global_step
        return context.finished()

    def _stepped(self, trainer: L.Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if self._context is None or not trainer.lightning_module.automatic_optimization:
            return output
        if not isinstance(output, dict):
            return returned_loss(output)
        return {**output, "loss": returned_loss(output["loss"])} if "loss" in output else output

    def _numbers(self, trainer: L.Trainer, number: int) -> random.Random:
        # A number for each batch, so that a fit that is resumed on it draws what the uninterrupted one has drawn.
        rank, ranks = data_parallel(trainer)
        key = f"{self.seed} {number * ranks + rank}"
        return random.Random(hashlib.blake2b(key.encode(), digest_size=16).digest())

    def finish(self, trainer: L.Trainer) -> None:
        """End the work on a batch.

        Raises:
            MisconfigurationException: If there was a backward pass, but no loss followed the plan.
        """
        by_hand = not trainer.lightning_module.automatic_optimization and trainer.global_step > self._steps
        if self.descends or by_hand:  # loss.backward() in manual optimization calls no hook
            self.require_loss(trainer)
        self.drop()

    def require_loss(self, trainer: L.Trainer) -> None:
        """Raise unless a loss of the batch followed the plan.

        Raises:
            MisconfigurationException: If none did.
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
            f" {type(module).__name__}.training_step was computed from the target, {where}. A loss of"
            " torch.nn.functional counts, and any value that torch computes from this tensor and the weights; a copy by"
            " NumPy or Python numbers, an autograd.Function and a compiled extension do not. Name another target="
            f" or compute the loss from it; where a library computes the loss, leave {tricks} out."
        )

    def drop(self) -> None:
        """Make the targets of the last batch plain labels again."""
        if self._context is not None:
            # Targets may live on in a buffer or a list of the user's, where they must be labels and nothing else.
            self._context.plan.open = False
            self._context = None

    def close(self) -> None:
        """Restore the strategy."""
        self.drop()
        self._undo.close()


def chosen(callbacks: Sequence[BatchCallback], numbers: random.Random) -> list[BatchCallback]:
    """The callbacks without a ``prob`` in their order, and after them at most one of the others.

    Probabilities that sum to more than 1 are divided by their sum.
    """
    always = sorted((callback for callback in callbacks if callback.prob is None), key=lambda callback: callback.order)
    left = numbers.random() * max(1.0, sum(callback.prob or 0.0 for callback in callbacks))
    for callback in callbacks:
        left -= callback.prob or 0.0
        if left < 0:
            return [*always, callback]
    return always
