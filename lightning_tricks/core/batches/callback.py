"""The base class of callbacks that change training batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.batches.paths import (
    INPUTS,
    TARGETS,
    Names,
    Path,
    check_names,
    described,
    get,
    is_read_only,
    locate,
    spelled,
)
from lightning_tricks.core.batches.pipeline import BatchContext, BatchPipeline
from lightning_tricks.core.checks import check_duration
from lightning_tricks.core.lightning.fit import plan_step
from lightning_tricks.core.lightning.trainer import callbacks_of, is_fitting, takes_dataloader_iter
from lightning_tricks.core.replay.graph import has_graph
from lightning_tricks.core.trick import Trick


class BatchCallback(Trick):
    """Changes training batches after their transfer to the device; a subclass says how.

    A subclass sets those of ``start``, ``stop``, ``inputs`` and ``target`` that it has before ``super().__init__()``.
    One without ``durations`` is always active. Callbacks with a ``prob`` are alternatives: at most one of them changes
    a batch, after all callbacks without one, in their ``order``.
    """

    start: int | float = 0
    stop: int | float = 1.0
    inputs: Names = None
    target: Names = None
    prob: float | None = None
    order = 0
    only_looks = False  # whether it looks at the losses of targets, and changes none
    durations: ClassVar[tuple[str, ...]] = ("start", "stop")

    def __init__(self) -> None:
        super().__init__()
        check_duration("start", self.start)
        check_duration("stop", self.stop)
        if type(self.start) is type(self.stop) and self.start > self.stop:
            raise ValueError(f"start must not be after stop, got start={self.start} and stop={self.stop}.")
        check_names("inputs", self.inputs)
        check_names("target", self.target)
        self._pipeline: BatchPipeline | None = None
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")]
        self._key = f"{type(self).__name__}({', '.join(settings)})"  # the Trainer asks for state_key in every hook

    @abstractmethod
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        """Change a batch, and the plan for its losses."""

    @abstractmethod
    def _check(self, trainer: L.Trainer, context: BatchContext) -> None:
        """Raise if such a batch could not be changed later; plan targets, so that their losses are checked as well."""

    def _begin(self) -> None:
        """Forget the last batch."""

    def _is_active(self, trainer: L.Trainer) -> bool:
        if not self.durations:
            return True
        # Lightning's LearningRateFinder trains before on_train_start, where the durations are resolved.
        return bool(self._steps) and self._steps["start"] <= plan_step(trainer) < self._steps["stop"]

    def inputs_in(self, batch: Any) -> list[Path]:
        """The paths of the inputs in a batch, which may be an input itself."""
        return [()] if isinstance(batch, Tensor) and self.inputs is None else self._found(batch, "inputs", INPUTS, 0)

    def targets_in(self, batch: Any) -> list[Path]:
        """The paths of the targets in a batch."""
        return self._found(batch, "target", TARGETS, 1)

    def targets_if_any(self, batch: Any) -> list[Path]:
        """The paths of the targets in a batch; none if none were asked for and none are there."""
        return locate(batch, None, TARGETS, 1) if self.target is None else self.targets_in(batch)

    def _samples(self, batch: Any, expected: int | None = None, paths: Sequence[Path] | None = None) -> int:
        """The number of samples in a batch, by its targets; ``paths`` are those of the targets, if known."""
        targets = [get(batch, path) for path in (self.targets_in(batch) if paths is None else paths)]
        sizes = {len(target) if target.ndim else 0 for target in targets}
        if len(sizes) > 1 or 0 in sizes or expected not in (None, *sizes):
            raise MisconfigurationException(
                f"{type(self).__name__} needs targets with one entry for each of {expected or 'the'} samples, got a"
                f" batch with {described(batch)}."
            )
        return sizes.pop()

    def _found(self, batch: Any, argument: str, names: Sequence[str], position: int) -> list[Path]:
        asked = getattr(self, argument)
        paths = locate(batch, asked, names, position)
        if not paths or (asked is None and len(paths) > 1):
            found = "several such tensors" if paths else "no such tensor"
            raise MisconfigurationException(
                f"{type(self).__name__}({argument}={asked!r}) finds {found} in the batch, which has {described(batch)}."
                f" Pass {argument}= with a key, an index, a path such as 'batch.0', or a list of those."
            )
        self._require_replaceable(batch, paths)
        return paths

    def _require_replaceable(self, batch: Any, paths: Sequence[Path]) -> None:
        """Raise for parts of a batch that cannot be replaced by others."""
        containers = [(path[:depth], get(batch, path[:depth])) for path in paths for depth in range(len(path))]
        if closed := [(path, container) for path, container in containers if is_read_only(container)]:
            raise MisconfigurationException(
                f"{type(self).__name__} changes entries of the batch, got a read-only {type(closed[0][1]).__name__} at"
                f" {spelled(closed[0][0])}: have the collate function return a dict."
            )
        if any(get(batch, path).layout not in (torch.strided, torch.jagged) for path in paths):
            raise MisconfigurationException(
                f"{type(self).__name__} needs dense inputs and targets, got a batch with {described(batch)}: make them"
                " dense by to_dense() in on_after_batch_transfer."
            )

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        if takes_dataloader_iter(pl_module):
            raise MisconfigurationException(
                f"{type(self).__name__} changes the batch before the training step, got"
                f" {type(pl_module).__name__}.training_step(dataloader_iter): take the batch as the argument."
            )
        callbacks = callbacks_of(trainer, BatchCallback)  # type: ignore[type-abstract]
        if self is callbacks[0]:
            pipeline = BatchPipeline(trainer, callbacks)
            self._undo.callback(pipeline.close)
            for callback in callbacks:
                callback._pipeline = pipeline

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        assert self._pipeline is not None, "setup comes first"
        self._pipeline.descends = True
        # In manual optimization another loss may follow. Without a graph, SAM runs the step again in micro-batches.
        if pl_module.automatic_optimization and has_graph(loss):
            self._pipeline.require_loss(trainer)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        assert self._pipeline is not None, "setup comes first"
        if self._pipeline.descends if pl_module.automatic_optimization else len(trainer.optimizers) == 1:
            self._pipeline.require_loss(trainer)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._pipeline is not None, "setup comes first"
        self._pipeline.finish(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._pipeline is not None, "setup comes first"
        self._pipeline.drop()  # the module may have skipped the last batch

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._pipeline is None else {"seed": self._pipeline.seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._pipeline is not None and state_dict:
            self._pipeline.seed = state_dict["seed"]

    @property
    @override
    def state_key(self) -> str:
        return self._key


class EveryBatchCallback(BatchCallback):
    """Base of the tricks that change every batch, so that there is no later one to look ahead to."""

    durations: ClassVar[tuple[str, ...]] = ()

    @override
    def _check(self, trainer: L.Trainer, context: BatchContext) -> None:
        raise AssertionError("it is active in every batch")
