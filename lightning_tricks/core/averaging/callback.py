"""The base class of callbacks that average weights: start, steps, validation, exceptions and the end of a fit."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.averaging.averages import Averages, Which
from lightning_tricks.core.averaging.foreign import for_lightning, has_swalr
from lightning_tricks.core.averaging.history import History
from lightning_tricks.core.averaging.migration import AsSaved
from lightning_tricks.core.averaging.ranks import agree_on_buffers, relative_distance
from lightning_tricks.core.averaging.resume import copies_in, find_state, load
from lightning_tricks.core.averaging.state import callback_state, saving_shards
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.fit import plan_step
from lightning_tricks.core.lightning.next_step import around_next_step
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.step_watch import StepObserver
from lightning_tricks.core.lightning.trainer import (
    callbacks_of,
    is_fitting,
    is_last_step,
    log_every_n_steps,
    monitors,
    validate_again,
)
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.by_engine import local_weights
from lightning_tricks.core.weights.tensors import float_buffers, hidden_from_autograd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


RAW = "_raw"  # The suffix of the raw weights' metrics with ``validate="both"``.
_FORKS = re.compile(r"(_epoch|_step)?(/dataloader_idx_\d+)?$")  # Suffixes of metrics by Lightning.


class Averaging(Trick, ABC):
    """A callback with averages of the weights, which need equal weights on all ranks, and which a rewind restores."""

    @abstractmethod
    def running(self) -> list[Averages]:
        """The averages of the present fit."""


class AveragingCallback(Averaging):
    """Averages the weights in a fit; a subclass says when averages are updated, and by how much.

    Every checkpoint holds the weights that are validated, and the state for a bit-equal resume.
    """

    start: int | float
    buffers: str
    validate: str
    at_end: Which
    device: str | None
    kinds: tuple[str, ...] = ()  # callbacks of Lightning whose averages go on in this one
    label: str = ""  # tells several callbacks of one class apart in the names of their metrics
    conflicts = (
        Conflict(
            ("AveragingCallback",),
            "only one average can be validated, and only one can be left in the module at the end, but both have"
            ' validate or at_end other than "raw"',
            'Set both to "raw" on all but one; their averaged() and averaged_state_dict() give their weights',
            lambda one, other: _both_shown(one, other),
        ),
        Conflict(
            ("WeightAveraging", "StochasticWeightAveraging"),
            "both put averaged weights into the module, for validation, checkpoints or at the end",
            "Remove one of them",
        ),
    )
    durations = ("start",)

    def __init__(self) -> None:
        super().__init__()
        self._last_trainer: pl.Trainer | None = None
        self._averages: Averages | None = None
        self._history = History()
        self._observer = StepObserver()
        self._fits = False  # whether a fit runs that this callback was set up for
        self._goes_on = False  # whether that fit continues the averages of the last one
        self._foreign = False  # whether the checkpoint that is being saved is of another module
        self._first_step = 0  # the number of optimizer steps before the fit
        self._awaits_weights = False  # whether lazy layers had no weights when averaging began
        self._finished = False  # whether the averages are complete, with no optimizer step since
        self._file: AsSaved | None = None  # the checkpoint that is being loaded, as the module's hook got it
        self._has_swalr = False  # whether the checkpoint has the schedule of Lightning's SWA
        self._raw_names: set[str] = set()  # the names of the raw weights' metrics
        self._postponed: list[Callable[[], None]] = []

    @abstractmethod
    def _update(self, trainer: pl.Trainer, averages: Averages) -> None:
        """Update the averages after an optimizer step."""

    def _begin(self, trainer: pl.Trainer, averages: Averages) -> None:
        """Called after the step that reached ``start``, when the averages have become copies of the weights."""

    def _finish(self, trainer: pl.Trainer, averages: Averages) -> None:
        """Called after the last step of training, with the raw weights in the module."""

    def _metrics(self, averages: Averages) -> dict[str, float]:
        """The metrics to log besides the distance."""
        return {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        self._undo.callback(self._observer.stop)
        weights = local_weights(trainer, pl_module, type(self).__name__)
        callbacks = averaging_callbacks(trainer)
        self._require_before_pruning(trainer)
        if all(callback._last_trainer is not trainer for callback in callbacks):
            # Stays after the fit: trainer.save_checkpoint then saves the averaged weights, too.
            wrap_method(trainer, "save_checkpoint", partial(save, trainer))
        if self is callbacks[0]:  # before any weights are exchanged
            for callback in callbacks:
                callback._goes_on = callback._owns(trainer)
        if self._averages is not None and self._goes_on:
            self._averages.show("raw")
        else:
            self._averages, self._history = Averages(weights, self.device), History()
        if self is callbacks[0]:
            self._wrap(pl_module, "on_load_checkpoint", partial(self._note_file, pl_module))
        if self.validate == "both":
            loop = trainer.fit_loop.epoch_loop.val_loop
            self._wrap(loop, "run", partial(self._validate_both, trainer))
        self._last_trainer, self._fits = trainer, True

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._has_swalr and trainer.lr_scheduler_configs:
            raise MisconfigurationException(
                f"{self.written()}: the checkpoint has the state of SWALR, the schedule of StochasticWeightAveraging,"
                f" and {type(trainer.lr_scheduler_configs[0].scheduler).__name__} cannot go on from it: return the"
                " optimizer alone to go on at the learning rate of the checkpoint."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._finished, self._first_step, self._file = False, trainer.global_step, None
        if self._running.tracks:
            self._track(joined=self._running.tensors)  # no other weights join in the middle of an epoch
            self._running.remember_weights()
            around_next_step(trainer, self._undo, partial(self._forget_replaced, trainer))
        self._observer.start(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Not in on_train_epoch_start, where a later callback (BackboneFinetuning) may still unfreeze weights.
        if batch_idx == 0 and self._running.tracks:
            self._track()
        # At first, and when a fit has gone back to before its averages.
        first = self._first_step == trainer.global_step and plan_step(trainer) >= self._steps["start"]
        if first and not self._running.tracks:
            around_next_step(trainer, self._undo, partial(self._begins, trainer))
        self._observer.follow(trainer)

    @contextmanager
    def _begins(self, trainer: pl.Trainer) -> Iterator[None]:
        """Begin to average at the first step, behind all hooks that draw or load weights before it.

        In automatic optimization that is after the forward pass, which may be what gives weights their first values.
        """
        automatic = trainer.lightning_module.automatic_optimization
        if automatic:
            yield
        self._track()
        if not automatic:
            yield

    @contextmanager
    def _forget_replaced(self, trainer: pl.Trainer) -> Iterator[None]:
        """Forget averages of weights that hooks have replaced since the fit began."""
        self._running.parts()  # follows weights that were renamed
        if not trainer.strategy.reduce_boolean_decision(not self._running.unchanged(), all=False):
            yield
            return
        rank_zero_warn(
            f"{type(self).__name__} has averages of weights that {type(trainer.lightning_module).__name__} has replaced"
            " as this fit began, so a new average begins. To go on with a fit, draw or load weights in on_train_start"
            " only where self.global_step is 0."
        )
        self._averages = Averages(self._running.weights, self.device)
        with self._begins(trainer):
            yield

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        self._running.guard()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = self._catch_up(trainer)
        if not self._running.tracks:
            if stepped and trainer.global_step == self._first_step:
                self._require_counted_steps(trainer)
            return
        if is_last_step(trainer):  # before the last validation and the last checkpoint
            self._finish_once(trainer)
        log_every_n_steps(trainer, partial(self._logged, trainer))

    def _logged(self, trainer: pl.Trainer) -> dict[str, float]:
        values = {"distance": relative_distance(trainer, self._running), **self._metrics(self._running)}
        suffix = f"/{self.label}" if len(callbacks_of(trainer, type(self))) > 1 else ""
        return {f"tricks/{type(self).__name__.lower()}_{name}{suffix}": value for name, value in values.items()}

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_fitting(trainer):
            agree_on_buffers(trainer, self._running)
            self._show("raw" if self.validate == "raw" else "averaged")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_fitting(trainer):
            return
        self._show("raw")
        if self.validate == "both" and not trainer.sanity_checking:
            self._history.record(trainer.global_step, trainer.callback_metrics, RAW)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for callback in averaging_callbacks(trainer):  # before any weights are exchanged
            callback._finish_once(trainer)
        agree_on_buffers(trainer, self._running)
        self._show(self.at_end)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._leave(self.at_end)  # a resumed fit with no step left has no on_train_end

    @override
    def _on_failure(self, trainer: pl.Trainer) -> None:
        super()._on_failure(trainer)
        if not self._fits:
            return
        try:
            self._catch_up(trainer)  # the exception may have come before on_train_batch_end
        finally:
            for callback in averaging_callbacks(trainer):
                if callback._averages is not None:
                    callback._averages.show("raw")
            self._leave("raw")
            self._save_postponed()

    def _validate_both(self, trainer: pl.Trainer, run: Callable[[], Any]) -> Any:
        """Validate the raw weights first, so that their metrics are there when the main validation ends."""
        if not trainer.sanity_checking:
            self._raw_names = validate_again(trainer, run, RAW)
        return run()

    def _require_before_pruning(self, trainer: pl.Trainer) -> None:
        """Raise if ModelPruning would make its masks permanent in the raw weights only."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]  # type: ignore[attr-defined]
        if self.at_end == "averaged" and any(isinstance(callback, ModelPruning) for callback in before):
            raise MisconfigurationException(
                f"{type(self).__name__} puts the averaged weights into the module at the end, after ModelPruning has"
                f" removed its masks there: put {type(self).__name__} before ModelPruning in callbacks=."
            )

    def _leave(self, which: Which) -> None:
        self._fits = False
        self._running.show(which)
        self._running.remember_weights()

    def _require_counted_steps(self, trainer: pl.Trainer) -> None:
        """Raise if ``start`` will not come, since the steps so far are not counted by Lightning."""
        module = trainer.lightning_module
        knows = any(optimizer.param_groups for optimizer in trainer.optimizers)  # Lightning's stand-in has none
        past = self._observer.known or trainer.is_last_batch or not knows  # else Lightning's may accumulate
        if past and not module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self).__name__}(start={self.start}) waits for optimizer steps that Lightning counts, and"
                f" {type(module).__name__} steps an optimizer past it: step what self.optimizers() returns, or pass"
                " start=0."
            )

    def _catch_up(self, trainer: pl.Trainer) -> bool:
        """Update the averages by the optimizer step of this batch; returns whether there was one."""
        if not self._observer.stepped():
            return False
        self._finished = False
        if self._running.tracks:
            if self._awaits_weights:
                self._track()
            self._update(trainer, self._running)
        elif plan_step(trainer) >= self._steps["start"]:
            self._track()
            self._begin(trainer, self._running)
        return True

    def _finish_once(self, trainer: pl.Trainer) -> None:
        """Complete the averages when training has ended; the module holds its raw weights."""
        if self._running.tracks and not self._finished:
            self._finish(trainer, self._running)
            self._finished = True
            self._save_postponed()

    def _track(self, joined: Collection[str] | None = None) -> None:
        parameters = self._running.module.parameters()
        self._awaits_weights = any(isinstance(parameter, nn.UninitializedParameter) for parameter in parameters)
        found = self._chosen()
        self._running.track({name: part for name, part in found.items() if joined is None or name in joined})

    def _chosen(self) -> dict[str, Tensor]:
        """The weights to average."""
        buffers = float_buffers(self._running.module) if self.buffers == "average" else {}
        return {**self._running.weights.trainable(), **buffers}

    @contextmanager
    def averaged(self, pl_module: nn.Module) -> Iterator[None]:
        """Put the averaged weights into ``pl_module`` inside the ``with`` block, and the earlier ones back after it.

        Args:
            pl_module: The module that was, or is being, trained with this callback.

        Raises:
            ValueError: If this callback has no average of that module.
        """
        if self._averages is None or self._averages.module is not pl_module:
            raise ValueError(
                f"This {type(self).__name__} has no average of that {type(pl_module).__name__}: fit it first."
            )
        assert self._last_trainer is not None, "averages are of a fit"
        with raw_weights(self._last_trainer, pl_module), self._averages.showing("averaged"):
            yield

    def averaged_state_dict(self) -> dict[str, Any]:
        """A copy of the module's ``state_dict()`` with the averaged weights in it.

        Where the weights are sharded, all ranks take part, and every rank gets the full weights in host memory. For a
        model that is too large for that, use ``trainer.save_checkpoint`` and ``lightning-tricks export``.

        Raises:
            ValueError: If this callback has no average yet.
        """
        if self._averages is None:
            raise ValueError(
                f"This {type(self).__name__} has no average: fit a module with it first, and call this"
                " before a checkpoint is loaded into the module."
            )
        with self.averaged(self._averages.module):
            return self._averages.weights.state()

    def plot(self, metric: str | None = None, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw a validation metric of the averaged and of the raw weights over the optimizer steps.

        Args:
            metric: Name of the averaged weights' metric; None for the first one that was logged.
            ax: Axes of matplotlib to draw into; None for a new figure.

        Raises:
            ValueError: If there is no such metric; only ``validate="both"`` records any.
        """
        return self._history.plot(metric, ax)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if not is_fitting(trainer):
            self._averages = None  # the module now holds the weights of that checkpoint
            return
        weights = local_weights(trainer, pl_module, type(self).__name__)
        self._averages, self._history = Averages(weights, self.device), History()
        self._has_swalr = has_swalr(checkpoint)
        file = averaging_callbacks(trainer)[0]._file
        saved = checkpoint if file is None else file.checkpoint
        if found := find_state(trainer, self, saved, weights.trainable()):
            if not found.goes_on:
                rank_zero_warn(
                    f"{self.written()} begins a new average: the checkpoint has one of {found.name}, whose raw weights"
                    " train on."
                )
            elif not found.whole:
                self._history.load_state_dict(found.state["history"])
            load(trainer, self._averages, found, self._chosen(), checkpoint, file)

    def _note_file(
        self, module: pl.LightningModule, hook: Callable[[dict[str, Any]], None], checkpoint: dict[str, Any]
    ) -> None:
        """Keep the checkpoint as it is before the module's own ``on_load_checkpoint`` changes it."""
        if "state_dict" in checkpoint and not self._running.weights.sharded and any(copies_in(checkpoint)):
            self._file = AsSaved(checkpoint, module, hook, copies_in)
            self._undo.callback(setattr, self, "_file", None)
        hook(checkpoint)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._foreign or self._averages is None or self._last_trainer is None:
            return {}
        return {**callback_state(self._last_trainer, self._averages), "history": self._history.state_dict()}

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the raw weights under the name that Lightning's WeightAveraging reads, too; a file has each once."""
        state = checkpoint["callbacks"].get(self.state_key, {})
        if state.get("raw"):
            checkpoint |= for_lightning(checkpoint["state_dict"], state)

    def _scored(self, trainer: pl.Trainer, filepath: str | Path) -> Which:
        """The weights that the monitored metric of a checkpoint file was measured with."""
        monitor = _FORKS.sub("", monitors(trainer, str(filepath)) or "")
        return "raw" if self.validate == "raw" or monitor in self._raw_names else "averaged"

    def _show(self, which: Which) -> None:
        self._running.show(which)
        self._save_postponed()

    def _save_postponed(self) -> None:
        while self._postponed:
            self._postponed.pop(0)()

    def _owns(self, trainer: pl.Trainer) -> bool:
        """Whether the averages belong to the Trainer's module, whose weights have not changed since the fit."""
        averages = self._averages
        if averages is None or trainer is not self._last_trainer or trainer.lightning_module is not averages.module:
            return False
        return self._fits or averages.unchanged()

    @override
    def running(self) -> list[Averages]:
        return [self._running]

    @property
    def _running(self) -> Averages:
        assert self._averages is not None, "setup comes first"
        return self._averages


def _both_shown(one: AveragingCallback, other: AveragingCallback) -> bool:
    """Whether two averages would both be validated or left in the module; other classes may refuse more."""
    pairs = (one.validate, other.validate), (one.at_end, other.at_end)
    return one.conflicts is other.conflicts and any("raw" not in pair for pair in pairs)


def averaging_callbacks(trainer: pl.Trainer) -> list[AveragingCallback]:
    """The Trainer's averaging callbacks, in their order."""
    return callbacks_of(trainer, AveragingCallback)  # type: ignore[type-abstract]


@contextmanager
def raw_weights(trainer: pl.Trainer, module: nn.Module) -> Iterator[None]:
    """Put the raw weights into a module inside the block, in which an average of the Trainer's may be."""
    with ExitStack() as stack:
        for averages in (callback._averages for callback in averaging_callbacks(trainer)):
            if averages is not None and averages.module is module:
                stack.enter_context(averages.showing("raw"))
        yield


def save(
    trainer: pl.Trainer,
    original: Callable[..., None],
    filepath: str | Path,
    weights_only: bool | None = None,
    storage_options: Any = None,
) -> None:
    """Save a checkpoint while the module holds the weights that are validated; called for every save of the Trainer."""
    again = partial(save, trainer, original, filepath, weights_only, storage_options)
    callbacks = averaging_callbacks(trainer)
    for callback in callbacks:
        if callback._averages is not None and callback._averages.busy:
            callback._postponed.append(again)  # a signal handler saves while weights are exchanged
            return
    for callback in callbacks:
        if callback._fits:
            callback._catch_up(trainer)  # the save may come between a step and on_train_batch_end
            agree_on_buffers(trainer, callback._running)
    # Before any weights are exchanged: to another average, exchanged weights look changed by the user.
    owners = [callback for callback in callbacks if callback._owns(trainer)]
    with ExitStack() as stack:
        for callback in callbacks:
            callback._foreign = callback not in owners
            stack.callback(setattr, callback, "_foreign", False)
        for callback in owners:
            stack.enter_context(
                hidden_from_autograd([*callback._running.parts(), *callback._running.weights.model_copies()])
            )
            stack.enter_context(callback._running.showing(callback._scored(trainer, filepath)))
        if not weights_only and owners:
            averages = {callback.state_key: callback._running for callback in owners}
            stack.enter_context(saving_shards(trainer, averages, filepath))
        original(filepath, weights_only, storage_options)
    for callback in callbacks:
        callback._save_postponed()
