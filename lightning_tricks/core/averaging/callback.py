"""The base class of callbacks that average weights and show them: start, steps, validation and the end of a fit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.averaging.agree import apart
from lightning_tricks.core.averaging.averages import Averages, Which
from lightning_tricks.core.averaging.coordinator import Averaging, Coordinator, coordinator_of
from lightning_tricks.core.averaging.resume import find_state, has_swalr, load
from lightning_tricks.core.averaging.state import callback_state, for_lightning
from lightning_tricks.core.averaging.validation import RawMetrics
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.figures import Axes, Figure
from lightning_tricks.core.lightning.fit import plan_step
from lightning_tricks.core.lightning.next_step import around_next_step
from lightning_tricks.core.lightning.trainer import callbacks_of, is_fitting, is_last_step, log_every_n_steps
from lightning_tricks.core.weights.by_engine import local_weights
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import float_buffers


class AveragingCallback(Averaging):
    """Averages the weights in a fit; a subclass says when averages are updated, and by how much.

    Every checkpoint holds the weights that are validated, and the state for a bit-equal resume.
    """

    start: int | float
    buffers: str
    validate: str
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
        ),
    )
    durations = ("start",)

    def __init__(self) -> None:
        super().__init__()
        self._averages: Averages | None = None
        self._raw_metrics = RawMetrics()
        self._first_step = 0  # the number of optimizer steps before the fit
        self._awaits_weights = False  # whether lazy layers had no weights when averaging began
        self._finished = False  # whether the averages are complete, with no optimizer step since
        self._has_swalr = False  # whether the checkpoint has the schedule of Lightning's SWA

    @abstractmethod
    def _update(self, trainer: L.Trainer, averages: Averages) -> None:
        """Update the averages after an optimizer step."""

    def _begin(self, trainer: L.Trainer, averages: Averages) -> None:
        """Called after the step that reached ``start``, when the averages have become copies of the weights."""

    def _finish(self, trainer: L.Trainer, averages: Averages) -> None:
        """Called after the last step of training, with the raw weights in the module."""

    def _metrics(self, averages: Averages) -> dict[str, float]:
        """The metrics to log besides the distance."""
        return {}

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        weights = local_weights(trainer, pl_module, type(self).__name__)
        self._require_before_pruning(trainer)
        if not coordinator_of(trainer).join(self):
            self._begin_anew(weights)
        if self.validate == "both":
            loop = trainer.fit_loop.epoch_loop.val_loop
            self._wrap(loop, "run", partial(self._validate_both, trainer))

    def _validate_both(self, trainer: L.Trainer, run: Callable[[], Any]) -> Any:
        self._shared.agree()  # before a strategy averages weights that are still being copied to the host
        return self._raw_metrics.validate(trainer, run)

    def _begin_anew(self, weights: LocalWeights) -> None:
        self._averages = Averages(weights, self.device)
        self._raw_metrics.load_state_dict({})

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._has_swalr and trainer.lr_scheduler_configs:
            raise MisconfigurationException(
                f"{self.written()}: the checkpoint has the state of SWALR, the schedule of StochasticWeightAveraging,"
                f" and {type(trainer.lr_scheduler_configs[0].scheduler).__name__} cannot go on from it: return the"
                " optimizer alone to go on at the learning rate of the checkpoint."
            )

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._finished, self._first_step = False, trainer.global_step
        if self._running.tracks:
            self._track(joined=self._running.tensors)  # no other weights join in the middle of an epoch
            self._running.remember_weights()
            around_next_step(trainer, self._undo, partial(self._forget_replaced, trainer))

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        # Not in on_train_epoch_start, where a later callback (BackboneFinetuning) may still unfreeze weights.
        if batch_idx == 0 and self._running.tracks:
            self._track()
        # At first, and when a fit has gone back to before its averages.
        first = self._first_step == trainer.global_step and plan_step(trainer) >= self._steps["start"]
        if first and not self._running.tracks:
            around_next_step(trainer, self._undo, partial(self._begins, trainer))

    @contextmanager
    def _begins(self, trainer: L.Trainer) -> Iterator[None]:
        """Begin to average at the first step, after all hooks that draw or load weights before it.

        In automatic optimization that is after the forward pass, which may be what gives weights their first values.
        """
        automatic = trainer.lightning_module.automatic_optimization
        if automatic:
            yield
        self._track()
        if not automatic:
            yield

    @contextmanager
    def _forget_replaced(self, trainer: L.Trainer) -> Iterator[None]:
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
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        self._running.guard()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = self.catch_up(trainer)
        if not self._running.tracks:
            if stepped and trainer.global_step == self._first_step:
                self._require_counted_steps(trainer)
            return
        if is_last_step(trainer):  # before the last validation and the last checkpoint
            self.finish(trainer)
        log_every_n_steps(trainer, partial(self._logged, trainer))

    def _logged(self, trainer: L.Trainer) -> dict[str, float]:
        values = {"distance": self._running.distance(trainer.strategy.root_device), **self._metrics(self._running)}
        suffix = f"/{self.label}" if len(callbacks_of(trainer, type(self))) > 1 else ""
        return {f"tricks/{type(self).__name__.lower()}_{name}{suffix}": value for name, value in values.items()}

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_fitting(trainer):
            self._shared.agree()
            self._shared.show(self._running, "raw" if self.validate == "raw" else "averaged")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not is_fitting(trainer):
            return
        self._shared.show(self._running, "raw")
        if self.validate == "both" and not trainer.sanity_checking:
            self._raw_metrics.record(trainer.global_step, trainer.callback_metrics)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._shared.finish()
        self._shared.agree()
        self._shared.show(self._running, self.at_end)

    def _require_before_pruning(self, trainer: L.Trainer) -> None:
        """Raise if ModelPruning would make its masks permanent in the raw weights only."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]  # type: ignore[attr-defined]
        if self.at_end == "averaged" and any(isinstance(callback, ModelPruning) for callback in before):
            raise MisconfigurationException(
                f"{type(self).__name__} puts the averaged weights into the module at the end, after ModelPruning has"
                f" removed its masks there: put {type(self).__name__} before ModelPruning in callbacks=."
            )

    def _require_counted_steps(self, trainer: L.Trainer) -> None:
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

    @override
    def catch_up(self, trainer: L.Trainer) -> bool:
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

    @override
    def finish(self, trainer: L.Trainer) -> None:
        if self._running.tracks and not self._finished:
            self._finish(trainer, self._running)
            self._finished = True
            self._shared.save_postponed()

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

        Under local SGD all ranks take part during a fit, and average their weights as for a validation.

        Args:
            pl_module: The module that was, or is being, trained with this callback.

        Raises:
            ValueError: If this callback has no average of that module.
        """
        if self._averages is None or self._averages.module is not pl_module:
            raise ValueError(
                f"This {type(self).__name__} has no average of that {type(pl_module).__name__}: fit it first."
            )
        if apart(self._shared.trainer):
            self._shared.agree()
        with self._shared.showing_only(self._averages):
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
        return self._raw_metrics.plot(metric, ax)

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if not is_fitting(trainer):
            self._averages = None  # the module now holds the weights of that checkpoint
            return
        weights = local_weights(trainer, pl_module, type(self).__name__)
        self._begin_anew(weights)
        self._has_swalr = has_swalr(checkpoint)
        file = self._shared.file
        saved = checkpoint if file is None else file.checkpoint
        if found := find_state(trainer, self, saved, weights.trainable()):
            if not found.goes_on:
                rank_zero_warn(
                    f"{self.written()} begins a new average: the checkpoint has one of {found.name}, whose raw weights"
                    " train on."
                )
            elif not found.whole:
                self._raw_metrics.load_state_dict(found.state["history"])
            load(trainer, self._running, found, self._chosen(), checkpoint, file)

    @override
    def state_dict(self) -> dict[str, Any]:
        shared = self.coordinator
        if shared is None or self._averages is None or self.is_foreign:
            return {}
        return {**callback_state(shared.trainer, self._averages), "history": self._raw_metrics.state_dict()}

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the raw weights under the name that Lightning's WeightAveraging reads, too; a file has each once."""
        state = checkpoint["callbacks"].get(self.state_key, {})
        if state.get("raw"):
            checkpoint |= for_lightning(checkpoint["state_dict"], state)

    @override
    def measured(self, trainer: L.Trainer, filepath: str | Path) -> Which:
        return "raw" if self.validate == "raw" or self._raw_metrics.chose(trainer, filepath) else "averaged"

    @override
    def running(self) -> dict[str, Averages]:
        return {} if self._averages is None else {self.state_key: self._averages}

    @property
    def _shared(self) -> Coordinator:
        assert self.coordinator is not None, "setup comes first"
        return self.coordinator

    @property
    def _running(self) -> Averages:
        assert self._averages is not None, "setup comes first"
        return self._averages


def _both_shown(one: AveragingCallback, other: AveragingCallback) -> bool:
    """Whether two averages would both be validated or left in the module; other classes may refuse more."""
    pairs = (one.validate, other.validate), (one.at_end, other.at_end)
    return one.conflicts is other.conflicts and any("raw" not in pair for pair in pairs)
