"""What goes on in the layers of a network while it trains: gradients, updates, dead units, activations."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.advisor.layer_statistics import LayerStatistics, Look
from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.core.checks import check_count
from lightning_tricks.core.figures import Axes, Figure, pyplot
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.replay.undone_fit import UndoneFit, require_undoable
from lightning_tricks.core.report import Grid, Tabled, plain_table
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.safe_load.own_folder import unused
from lightning_tricks.core.weights.gradients import GradientCallback
from lightning_tricks.core.weights.local import LocalWeights

__all__ = ["InspectTraining", "TrainingInspection", "inspect_training"]

# What stands out. A usual update is about 1e-3 of the weights; the other bounds are far from what is usual.
_DEAD, _LARGE_UPDATE, _SMALL_UPDATE, _VANISHED = 0.2, 0.1, 1e-6, 1e-4


@dataclass(frozen=True)
class TrainingInspection(Tabled):
    """The result of ``inspect_training``, and what ``InspectTraining`` draws.

    Args:
        first: Optimizer steps before those that were looked at.
        steps: Number of optimizer steps that were looked at.
        layers: Statistics of the layers, in the order of the network.

    Example:
        >>> head = LayerStatistics("head", gradient=1.0, update=0.25, dead=0.0, activation=1.0)
        >>> TrainingInspection(0, 20, (head,)).findings
        ['head: an update is 25% of the weights. Its learning rate is probably too high.']
    """

    first: int
    steps: int
    layers: tuple[LayerStatistics, ...]

    @property
    def findings(self) -> list[str]:
        """What stands out, one sentence or two for each, with the layer's name."""
        gradients = [layer.gradient for layer in self.layers if layer.gradient is not None]
        usual = median(gradients) if gradients else 0.0
        return [f"{layer.name}: {text}" for layer in self.layers for text in _findings(layer, self.steps, usual)]

    @override
    def _grid(self) -> Grid:
        columns = ("layer", "gradient", "update/weight", "dead units", "activation")
        rows = [
            (
                *(layer.name, _spelled(layer.gradient), _spelled(layer.update)),
                *(_spelled(layer.dead, ".0%"), _spelled(layer.activation)),
            )
            for layer in self.layers
        ]
        title = f"{self.steps} optimizer steps from step {self.first} on"
        return Grid(columns, rows, above=[title], below=self.findings)

    def __str__(self) -> str:
        grid = self._grid()
        return "\n".join([*grid.above, plain_table(grid.columns, grid.rows, 1000), *grid.below])

    def plot(self) -> tuple[Figure, list[Axes]]:
        """Draw the four statistics over the layers, in a new figure.

        Raises:
            ImportError: If matplotlib is missing.
        """
        places = range(len(self.layers))
        width = min(4 + 0.25 * len(self.layers), 100)  # inches
        figure, axes = pyplot().subplots(4, 1, sharex=True, figsize=(width, 9), layout="constrained")
        for ax, key, label in zip(
            axes,
            ("gradient", "update", "dead", "activation"),
            ("gradient norm", "update / weight", "dead units", "activation (rms)"),
            strict=True,
        ):
            values = [getattr(layer, key) for layer in self.layers]
            ax.plot(places, [math.nan if value is None else value for value in values], ".-")
            ax.set(ylabel=label)
            if key == "dead":
                ax.set_ylim(-0.05, 1.05)
            elif any(values):
                ax.set_yscale("log")
        axes[0].set_title(f"{self.steps} optimizer steps from step {self.first} on")
        axes[-1].set_xticks(places, [layer.name for layer in self.layers], rotation=90)
        return figure, list(axes)


def _findings(layer: LayerStatistics, steps: int, usual: float) -> Iterator[str]:
    gradient, update = layer.gradient, layer.update
    if gradient is None:
        yield (
            f"no gradient has come in {steps} steps. The loss does not depend on it, the graph is cut in front of the"
            " loss, or no optimizer holds its parameters."
        )
        return
    if not math.isfinite(gradient):
        yield "its gradient is not finite. Lower the learning rate, clip gradients, or train in bf16 instead of fp16."
    elif gradient < _VANISHED * usual:
        yield (
            f"its gradient ({gradient:.1e}) vanishes, the median over the layers is {usual:.1e}. Add norms or residual"
            " connections, or change its initial weights."
        )
    if layer.dead is not None and layer.dead >= _DEAD:
        yield (
            f"{layer.dead:.0%} of its units are dead, none of {steps} steps gave them a gradient. Lower the learning"
            " rate, look at the initial biases, or take an activation that is not flat."
        )
    if update is not None and update > _LARGE_UPDATE:
        yield f"an update is {update:.0%} of the weights. Its learning rate is probably too high."
    if update is not None and update < _SMALL_UPDATE:
        yield f"an update is {update:.1e} of the weights, so it hardly trains. Its learning rate is probably too low."


def _spelled(value: float | None, form: str = ".2e") -> str:
    return "-" if value is None else format(value, form)


class Inspector(GradientCallback):
    """Looks at a number of optimizer steps; a subclass says when, and what becomes of the result."""

    steps: int

    def __init__(self) -> None:
        super().__init__()
        self._look: Look | None = None

    @abstractmethod
    def _is_due(self, trainer: L.Trainer) -> bool:
        """Whether to begin to look now."""

    @abstractmethod
    def _report(self, trainer: L.Trainer, inspection: TrainingInspection) -> None:
        """Called when it has looked."""

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._look is None and self._is_due(trainer):
            assert self._weights is not None, "set in setup"
            self._weights.reshard()
            self._look = Look(pl_module, trainer.optimizers, trainer.global_step)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._look is not None:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    @override
    def _change(
        self, trainer: L.Trainer, optimizer: Optimizer, parameters: list[nn.Parameter], weights: LocalWeights
    ) -> None:
        assert self._look is not None, "it looks"
        self._look.gradients(parameters)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._look is not None and trainer.global_step >= self._look.first + self.steps:
            self._end(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._look is not None and trainer.global_step > self._look.first:
            self._end(trainer)

    def _end(self, trainer: L.Trainer) -> None:
        assert self._look is not None, "it looks"
        assert self._weights is not None, "set in setup"
        look = self._look
        self._weights.reshard()  # validation leaves some gathered
        inspection = TrainingInspection(look.first, trainer.global_step - look.first, look.layers())
        self._stop()
        self._report(trainer, inspection)

    def _stop(self) -> None:
        if self._look is not None:
            self._look.close()
            self._look = None

    @override
    def _close(self) -> None:
        self._stop()
        super()._close()


class _Once(Inspector):
    """Looks from the first step on."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.inspection: TrainingInspection | None = None

    @override
    def _is_due(self, trainer: L.Trainer) -> bool:
        return self.inspection is None

    @override
    def _report(self, trainer: L.Trainer, inspection: TrainingInspection) -> None:
        self.inspection = inspection


class _Trial(UndoneFit):
    """Ends the fit after some optimizer steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._count = steps

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + self._count


def inspect_training(
    trainer: L.Trainer,
    module: L.LightningModule,
    train_dataloaders: Any = None,
    datamodule: L.LightningDataModule | None = None,
    *,
    steps: int = 20,
) -> TrainingInspection:
    """Inspect a few training steps: gradient norms, ``||w' - w|| / ||w||``, dead units and activations by layer.

    The steps are those of a fit by the Trainer's own strategy, precision, accumulation and clipping, without its
    callbacks, loggers, validation, checkpoints and schedules. Afterwards everything is bit for bit as before, as with
    ``find_lr``. Print the result for a table with what stands out; ``.plot()`` draws it.

    Args:
        trainer: The Trainer that is to fit.
        module: The LightningModule.
        train_dataloaders: Training loaders, as ``trainer.fit`` takes them.
        datamodule: LightningDataModule, as ``trainer.fit`` takes it.
        steps: Number of optimizer steps, in as many epochs as that takes.

    Returns:
        The statistics of the layers, and what stands out.

    Raises:
        TypeError: For a value of the wrong type, or loaders that can be read only once.
        ValueError: If ``steps`` is below 1.
        MisconfigurationException: For lazy layers, sparse gradients, inside a fit, and under FSDP1, DeepSpeed and
            strategies that spawn or fork.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(accelerator="cpu", logger=False, enable_model_summary=False, max_epochs=1)
        >>> inspection = inspect_training(trainer, BoringModel(), steps=5)
        >>> [layer.name for layer in inspection.layers], inspection.steps
        (['layer'], 5)

    References:
        Karpathy, makemore part 3 (update ratios near 1e-3).
    """
    check_count("steps", steps)
    require_undoable(trainer, module, train_dataloaders, "inspect_training")
    look = _Once(steps)
    _Trial(steps).fit(trainer, module, train_dataloaders, datamodule, beside=[look])
    assert look.inspection is not None, "the fit has ended"
    return look.inspection


@final
class InspectTraining(Inspector):
    """Draws gradient norms, ``||w' - w|| / ||w||``, dead units and activations by layer, every now and then.

    It looks at ``steps`` optimizer steps from every ``every_n_steps``-th on, the first included, and writes
    ``step=N.png`` into the folder; a picture that is there stays, and the new one is called ``step=N-v1.png`` and so
    on. What stands out is told in the log. Training is bit for bit as without it, and between two pictures there are no
    hooks. A picture has gradients after accumulation, reduction over ranks and unscaling, before clipping; sharded ones
    are gathered, one at a time. Activations are those of rank zero. A layer in code that was compiled before shows
    none, since compiled code may not run new hooks.

    Args:
        folder: Folder of the pictures, which is made.
        every_n_steps: Optimizer steps from one picture to the next.
        steps: Number of optimizer steps that a picture shows, at most ``every_n_steps``.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        NotADirectoryError: If the folder is a file.
        ImportError: At setup, if matplotlib is missing.
        MisconfigurationException: At setup, under a strategy that owns the gradients (DeepSpeed, FSDP1); before a step,
            for sparse gradients or an optimizer that unscales its own (``fused=True`` under fp16).

    Example:
        >>> callback = InspectTraining("inspections", every_n_steps=1000)
        >>> trainer = L.Trainer(callbacks=[callback], accelerator="cpu", logger=False)
    """

    def __init__(self, folder: str | Path, *, every_n_steps: int = 1000, steps: int = 10) -> None:
        folder_of("folder", folder)
        check_count("every_n_steps", every_n_steps)
        check_count("steps", steps)
        if steps > every_n_steps:
            raise ValueError(f"steps must be at most every_n_steps={every_n_steps}, got {steps}: lower it.")
        super().__init__()
        self.folder, self.every_n_steps, self.steps = folder, every_n_steps, steps
        self._next = 0  # the step at which the next picture begins

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            pyplot()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._next = math.ceil(trainer.global_step / self.every_n_steps) * self.every_n_steps

    @override
    def _is_due(self, trainer: L.Trainer) -> bool:
        if trainer.global_step < self._next:
            return False
        self._next = (trainer.global_step // self.every_n_steps + 1) * self.every_n_steps
        return True

    @override
    def _report(self, trainer: L.Trainer, inspection: TrainingInspection) -> None:
        if trainer.is_global_zero:
            folder = Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            path = unused(folder, f"step={inspection.first}", ".png")
            figure, _ = inspection.plot()
            try:
                with atomic_write(path) as temporary:
                    figure.savefig(temporary)
            finally:
                pyplot().close(figure)
            rank_zero_info("\n".join([f"InspectTraining: {path}", *inspection.findings]))
