"""One coordinator a Trainer: whose averages are its module's, which weights the module holds, and what is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import lightning as L
from typing_extensions import override

from lightning_tricks.core.averaging.agree import agree_on, apart
from lightning_tricks.core.averaging.averages import Averages, Which
from lightning_tricks.core.averaging.resume import AsSaved, copies_in
from lightning_tricks.core.averaging.state import saving_shards
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.step_watch import StepObserver
from lightning_tricks.core.lightning.trainer import callbacks_of
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.tensors import hidden_from_autograd


class Averaging(Trick, ABC):
    """A callback with averages of the weights, which a rewind restores.

    It says when the averages are updated, and by how much. The rest is up to the coordinator of its Trainer.
    """

    at_end: Which = "raw"  # the weights in the module after training

    def __init__(self) -> None:
        super().__init__()
        self.coordinator: Coordinator | None = None  # that of the last Trainer
        self.is_foreign = False  # whether the checkpoint that is being saved is of another module than the averages
        self._observer = StepObserver()

    @abstractmethod
    def running(self) -> dict[str, Averages]:
        """The averages, by the keys of their states in a checkpoint."""

    @abstractmethod
    def catch_up(self, trainer: L.Trainer) -> bool:
        """Update the averages by the optimizer step of this batch, once; returns whether there was one."""

    def finish(self, trainer: L.Trainer) -> None:
        """Complete the averages when training has ended; the module holds the raw weights."""

    def measured(self, trainer: L.Trainer, filepath: str | Path) -> Which:
        """The weights that the monitored metric of a checkpoint file was measured with."""
        return "raw"

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.coordinator is not None:
            self.coordinator.file = None
        self._undo.callback(self._observer.stop)
        self._observer.start(trainer)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._observer.follow(trainer)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.coordinator is not None:
            self.coordinator.leave()  # a resumed fit with no step left has no on_train_end

    @override
    def _on_failure(self, trainer: L.Trainer) -> None:
        super()._on_failure(trainer)
        if self.coordinator is not None:
            self.coordinator.fail()


NAME = "lightning_tricks_averages"  # the attribute of a Trainer


class Coordinator:
    """Saves every checkpoint of a Trainer, and puts averages into its module and the raw weights back.

    Args:
        trainer: The Trainer, of which this is the only one.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.file: AsSaved | None = None  # the checkpoint that is being loaded, as the module's hook got it
        self._fitting: list[Averaging] = []  # the callbacks of the present fit, as far as they are set up
        self._going_on: list[Averaging] = []  # those whose averages were the module's as the fit began
        self._left_in: list[ref[Averaging]] = []  # those whose averages the last fit has left in the module
        self._postponed: list[Callable[[], None]] = []
        self._undo = ExitStack()
        # Stays after the fit: trainer.save_checkpoint then saves the averaged weights, too.
        wrap_method(trainer, "save_checkpoint", self._save)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # a copy of the Trainer makes its own

    # -- whose averages are the module's ------------------------------------------------------------------------------

    def join(self, callback: Averaging) -> bool:
        """Let a callback take part in the fit that begins; returns whether it goes on with the averages it has."""
        if callback is self._callbacks()[0]:
            self._begin()
        callback.coordinator = self
        self._fitting.append(callback)
        return callback in self._going_on

    def _begin(self) -> None:
        self._undo.close()
        self._fitting, module = [], self.trainer.lightning_module
        self._going_on, self._left_in = self._owners(), []
        for callback in self._going_on:
            for averages in callback.running().values():
                averages.show("raw")
        self._undo.callback(wrap_method(module, "on_load_checkpoint", partial(self._note_file, module)))

    def _owners(self) -> list[Averaging]:
        """The callbacks whose averages are of the module and its weights, which have not changed since the last fit.

        To be asked before any weights are exchanged: to another average, they would look changed by the user.
        """
        callbacks = self._callbacks()
        if any(callback() not in callbacks for callback in self._left_in):
            return []  # the module holds the averages of a callback that is gone, and nobody has the raw weights
        return [callback for callback in callbacks if self._owns(callback)]

    def _owns(self, callback: Averaging) -> bool:
        module, running = self.trainer.lightning_module, callback.running().values()
        if not running or callback.coordinator is not self or any(one.module is not module for one in running):
            return False
        return callback in self._fitting or all(averages.unchanged() for averages in running)

    def _callbacks(self) -> list[Averaging]:
        return callbacks_of(self.trainer, Averaging)  # type: ignore[type-abstract]

    def _all(self) -> list[Averages]:
        return [averages for callback in self._callbacks() for averages in callback.running().values()]

    # -- which weights the module holds -------------------------------------------------------------------------------

    def agree(self) -> None:
        """Let all ranks have the same averages, and weights, before they are seen or saved; all ranks take part."""
        running = self._all()
        if strategy := apart(self.trainer):
            for averages in running:
                averages.synchronize()  # with copies of the weights that are under way
            strategy.average_weights()
        for averages in running:
            agree_on(self.trainer, averages)

    def show(self, averages: Averages, which: Which) -> None:
        """Put the averaged or the raw weights into the module, and save what had to wait until they are there."""
        averages.show(which)
        self.save_postponed()

    @contextmanager
    def showing_only(self, averages: Averages) -> Iterator[None]:
        """Put averages into their module inside the block, in which another average of the Trainer's may be."""
        with ExitStack() as stack:
            for other in self._all():
                if other.module is averages.module:
                    stack.enter_context(other.showing("raw"))
            stack.enter_context(averages.showing("averaged"))
            yield

    def finish(self) -> None:
        """Complete all averages, before any weights are exchanged."""
        for callback in self._fitting:
            callback.finish(self.trainer)

    def leave(self, which: Which | None = None) -> None:
        """End the fit, and remember the weights that it leaves in the module: for None those that callbacks chose."""
        running = [(callback, averages) for callback in self._fitting for averages in callback.running().values()]
        for callback, averages in running:
            averages.show(which or callback.at_end)
        for _, averages in running:
            averages.remember_weights()
        self._left_in += [ref(callback) for callback, averages in running if averages.holds == "averaged"]
        self._fitting, self._going_on = [], []
        self._undo.close()
        self.save_postponed()

    def fail(self) -> None:
        """End the fit after an exception, with the raw weights in the module."""
        with ExitStack() as stack:  # what fails for one callback is done for the others
            stack.callback(self.leave, "raw")
            for callback in reversed(self._fitting):
                stack.callback(callback.catch_up, self.trainer)  # the exception may have come before on_train_batch_end

    # -- what is saved, and loaded ------------------------------------------------------------------------------------

    def _save(
        self,
        original: Callable[..., None],
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any = None,
    ) -> None:
        """Save a checkpoint while the module holds the weights that are validated; for every save of the Trainer."""
        if self._is_busy():  # a signal handler saves while weights are exchanged
            self._postponed.append(partial(self._save, original, filepath, weights_only, storage_options))
            return
        for callback in self._fitting:
            callback.catch_up(self.trainer)  # the save may come between a step and on_train_batch_end
        owners, saved = self._owners(), dict[str, Averages]()
        if self._fitting or apart(self.trainer):
            self.agree()
            for averages in [one for each in owners if each not in self._fitting for one in each.running().values()]:
                averages.remember_weights()  # an exception has left the ranks with weights of their own until now
        with ExitStack() as stack:
            for callback in self._callbacks():
                callback.is_foreign = callback not in owners
                stack.callback(setattr, callback, "is_foreign", False)
            for callback in owners:
                which = callback.measured(self.trainer, filepath)
                for key, averages in callback.running().items():
                    saved[key] = averages
                    # A save may come between a forward and its backward pass, whose graph keeps the weights.
                    weights = [*averages.parts(), *averages.weights.model_copies()]
                    stack.enter_context(hidden_from_autograd(weights))
                    stack.enter_context(averages.showing(which))
            if saved and not weights_only:
                stack.enter_context(saving_shards(self.trainer, saved, filepath))
            original(filepath, weights_only, storage_options)
        self.save_postponed()

    def _is_busy(self) -> bool:
        return any(averages.busy for averages in self._all())

    def save_postponed(self) -> None:
        """Save the checkpoints that were asked for while weights were exchanged."""
        while self._postponed and not self._is_busy():
            self._postponed.pop(0)()

    def _note_file(
        self, module: L.LightningModule, hook: Callable[[dict[str, Any]], None], checkpoint: dict[str, Any]
    ) -> None:
        """Keep the checkpoint as it is before the module's own ``on_load_checkpoint`` changes it."""
        sharded = any(averages.weights.sharded for averages in self._all())
        if "state_dict" in checkpoint and not sharded and any(copies_in(checkpoint)):
            self.file = AsSaved(checkpoint, module, hook)
            self._undo.callback(setattr, self, "file", None)
        hook(checkpoint)


def coordinator_of(trainer: L.Trainer) -> Coordinator:
    """The coordinator of a Trainer, which its first averaging callback makes; it outlives that callback."""
    coordinator = getattr(trainer, NAME, None)
    if coordinator is None:
        coordinator = Coordinator(trainer)
        setattr(trainer, NAME, coordinator)
    return coordinator
