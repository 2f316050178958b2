"""Between the loader and the training step: callbacks that change the batches a module trains on."""

from __future__ import annotations

import hashlib
import inspect
import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.checks import check_duration
from lightning_tricks.core.structure import INPUTS, TARGETS, Names, Path, check_names, described, get, locate, put
from lightning_tricks.core.targets import Plan, knowing
from lightning_tricks.core.trainer import callbacks_of, is_fitting, wrap_method


class Work:
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
        self.plan = Plan()
        self.partners: Tensor | None = None  # the sample that each sample is mixed with
        self.targets: dict[Path, str] = {}  # those that compute the loss by the plan, and who asked for it

    def know(self, callback: BatchCallback) -> None:
        """Have the targets that a callback names compute the loss by the plan."""
        self.targets |= dict.fromkeys(callback.targets_in(self.batch), type(callback).__name__)

    def finished(self) -> Any:
        """The batch as the module gets it."""
        second = self.partners is not None and not isinstance(self.plan.lam, Tensor) and self.plan.lam < 0.5
        if second:  # then it is the second label that the target looks like
            self.plan.lam = 1 - self.plan.lam
        for path in self.targets:
            target = get(self.batch, path)
            branches = [target] if self.partners is None else [target, target[self.partners]]
            branches = branches[::-1] if second else branches
            self.batch = put(self.batch, path, knowing(branches, self.plan))
        return self.batch


class BatchCallback(Callback):
    """Changes training batches behind their transfer to the device; a subclass says how.

    Callbacks with a ``prob`` are alternatives: at most one of them changes a batch, after all those without.
    """

    start: int | float
    stop: int | float
    inputs: Names
    target: Names
    prob: float | None = None

    def __init__(self) -> None:
        check_duration("start", self.start)
        check_duration("stop", self.stop)
        check_names("inputs", self.inputs)
        check_names("target", self.target)
        self._tap: Tap | None = None
        self._window = (0.0, 0.0)

    @abstractmethod
    def _steps(self, trainer: pl.Trainer) -> tuple[float, float]:
        """The optimizer steps between which batches are changed."""

    @abstractmethod
    def _change(self, trainer: pl.Trainer, work: Work) -> None:
        """Change a batch, and what becomes of its losses."""

    def _begin(self) -> None:
        """Forget the last batch."""

    def inputs_in(self, batch: Any) -> list[Path]:
        """Where the inputs of a batch are."""
        return self._found(batch, "inputs", INPUTS, 0)

    def targets_in(self, batch: Any) -> list[Path]:
        """Where the targets of a batch are."""
        return self._found(batch, "target", TARGETS, 1)

    def _found(self, batch: Any, argument: str, names: Sequence[str], position: int) -> list[Path]:
        asked = getattr(self, argument)
        paths = locate(batch, asked, names, position)
        if not paths:
            raise MisconfigurationException(
                f"{type(self).__name__}({argument}={asked!r}) finds no such tensor in the batch, which has"
                f" {described(batch)}. Pass {argument}= with a key, an index, or a path such as 'batch.0'."
            )
        return paths

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not is_fitting(trainer):
            return
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise MisconfigurationException(
                f"{type(self).__name__} changes the batch before the training step, got"
                f" {type(pl_module).__name__}.training_step(dataloader_iter): take the batch there."
            )
        callbacks = callbacks_of(trainer, BatchCallback)  # type: ignore[type-abstract]
        if self is callbacks[0]:
            tap = Tap(trainer, callbacks)
            for each in callbacks:
                each._tap = tap

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window = self._steps(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._tap is not None, "setup comes first"
        skipped = pl_module.automatic_optimization and not outputs
        self._tap.finish(type(pl_module).__name__, skipped)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._tap is not None:
            self._tap.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._tap is None else {"seed": self._tap.seed, "batches": self._tap.batches}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._tap is not None and state_dict:
            self._tap.seed, self._tap.batches = state_dict["seed"], state_dict["batches"]

    @property
    @override
    def state_key(self) -> str:
        settings = ("layer", "alpha", "keep", "mode", "start", "stop")
        named = [f"{name}={getattr(self, name)!r}" for name in settings if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(named)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tap": None}


class Tap:
    """Behind the strategy's transfer of batches to the device, for all callbacks of a Trainer.

    The random numbers of a batch depend on a seed (that of ``seed_everything``), the number of the batch and the rank.
    """

    def __init__(self, trainer: pl.Trainer, callbacks: Sequence[BatchCallback]) -> None:
        self.seed: int = trainer.strategy.broadcast(torch.initial_seed())
        self.batches = 0
        self._callbacks = callbacks
        self._work: Work | None = None
        self._in_step = False
        self._undo: Callable[[], None] | None = wrap_method(
            trainer.strategy, "batch_to_device", partial(self._transferred, trainer)
        )

    def _transferred(self, trainer: pl.Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        self._drop()
        for each in self._callbacks:
            each._begin()
        # no gradients are taken where batches are read for another purpose, such as the statistics of BatchNorm
        if batch is None or not trainer.training or not torch.is_grad_enabled():
            return batch
        self._in_step = True
        active = [each for each in self._callbacks if each._window[0] <= trainer.global_step < each._window[1]]
        work = Work(batch, self.batches, self._numbers(trainer))
        self.batches += 1
        for callback in chosen(active, work.numbers):
            callback._change(trainer, work)
        self._work = work
        return work.finished()

    def _numbers(self, trainer: pl.Trainer) -> random.Random:
        ranks = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        number = self.batches * ranks["num_replicas"] + ranks["rank"]
        return random.Random(hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=16).digest())

    def finish(self, module: str, skipped: bool) -> None:
        """End the work on a batch.

        Raises:
            MisconfigurationException: If no loss was computed by the plan, though a step was made.
        """
        work = self._work
        self._in_step = False
        self._drop()
        if work is None or skipped or not work.targets or work.plan.losses:
            return
        where = ", ".join(f"batch{''.join(f'[{name!r}]' for name in path)}" for path in work.targets)
        raise MisconfigurationException(
            f"{' and '.join(dict.fromkeys(work.targets.values()))} did nothing to batch {self.batches - 1}: no loss of"
            f" {module}.training_step was computed from the target, {where}. Looked for was a loss of"
            " torch.nn.functional, or anything else made of that very tensor, that depends on the weights: not of a"
            " copy through NumPy or Python numbers, an autograd.Function or a compiled extension. Name another target="
            " or compute the loss from it."
        )

    def _drop(self) -> None:
        if self._work is not None:
            self._work.plan.open = False
            self._work = None

    def close(self) -> None:
        """Leave the strategy as it was; a batch whose step was not finished does not count."""
        self._drop()
        if self._in_step:
            self._in_step = False
            self.batches -= 1
        if self._undo is not None:
            self._undo()
            self._undo = None


def chosen(callbacks: Sequence[BatchCallback], numbers: random.Random) -> list[BatchCallback]:
    """Those without a ``prob``, and behind them at most one of the others.

    Probabilities that sum to more than 1 are divided by their sum.
    """
    always = [each for each in callbacks if each.prob is None]
    left = numbers.random() * max(1.0, sum(each.prob or 0.0 for each in callbacks))
    for each in callbacks:
        left -= each.prob or 0.0
        if left < 0:
            return [*always, each]
    return always
