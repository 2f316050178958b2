"""Layers that stop training late in the fit, from the stem to the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_tricks.core.checks import check_count, check_duration, check_range
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.fit import plan_step, steps_of
from lightning_tricks.core.selection import check_patterns
from lightning_tricks.core.weights.stages import StagedCallback, Stages, groups_by_pattern
from lightning_tricks.core.weights.tensors import trainable
from lightning_tricks.schedules.param_groups import known_layers, numbered_layers

__all__ = ["LayerFreezing", "frozen_layers"]


def frozen_layers(step: int, layers: int, *, fraction: float, start: float, stop: float) -> int:
    """The number of frozen layers: ``floor(layers * fraction * min(1, (step - start) / (stop - start)))``.

    Args:
        step: Optimizer steps so far.
        layers: Number of layers below the head.
        fraction: Fraction of them that has stopped at ``stop``, in [0, 1].
        start: Step at which it begins.
        stop: Step at which it ends, at least ``start``; at once if they are equal.

    Raises:
        ValueError: If ``step``, ``layers`` or ``start`` is negative, ``fraction`` is outside its range, or ``stop`` is
            below ``start``.

    Example:
        >>> [frozen_layers(step, 10, fraction=0.5, start=100, stop=200) for step in (100, 119, 120, 200, 300)]
        [0, 0, 1, 5, 5]
    """
    check_count("step", step, 0)
    check_count("layers", layers, 0)
    check_range("fraction", fraction, 0, 1)
    check_range("start", start, 0)
    check_range("stop", stop, 0)
    if stop < start:
        raise ValueError(f"stop must be at least start={start}, got {stop}.")
    if step < start:
        return 0
    share = min(1.0, (step - start) / (stop - start)) if stop > start else 1.0
    return math.floor(round(layers * fraction * share, 9))  # 0.29 * 100 is below 29


def freezing_order(model: nn.Module, parameters: str | Sequence[str] | None) -> list[list[str]]:
    r"""The names of the trainable parameters by layer, in the order in which layers stop, without the head.

    Args:
        model: The model.
        parameters: The layers, as for LayerFreezing.

    Raises:
        ValueError: If the layers are not found, or a weight in them is shared between modules.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
        >>> freezing_order(model, r"^(\d+)")
        [['0.weight'], ['1.weight']]
    """
    own = "parameters"  # the user's argument, for the error messages
    if parameters is None or isinstance(parameters, str):
        keys = known_layers(model, own) if parameters is None else numbered_layers(model, parameters, own)
        names = list(trainable(model))
        layers = sorted({keys[name] for name in names})[:-1]
        order = [[name for name in names if keys[name] == layer] for layer in layers]
    else:
        order = groups_by_pattern(model, parameters)
    named = dict(model.named_parameters())
    stops = {id(named[name]): name for names in order for name in names}
    for path, owner in model.named_modules():  # A module with two names, such as a compiled one, is visited once.
        for own_name, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{own_name}" if path else own_name
            if (first := stops.get(id(parameter), name)) != name:
                raise ValueError(
                    f"a layer that stops must not share weights, {first} is {name} as well, which would stop with it."
                    " Untie them, or name layers without it in parameters=."
                )
    return order


@final
class LayerFreezing(StagedCallback):
    r"""Layer freezing: the first layers are frozen late in the fit, one by one from the stem, and steps get cheaper.

    From ``start`` on, ``floor(layers * fraction * (step - start) / (stop - start))`` of the layers below the head have
    stopped. A layer that has stopped gets no gradient, so the backward pass ends above it; neither momentum nor weight
    decay nor SAM moves it, its optimizer state and gradients are freed, and its BatchNorm layers are in eval mode,
    since a layer whose statistics still move has not stopped. Averages (EMA) approach its last weights. After training
    everything is trainable again.

    The backward pass ends early only if nothing in front of the layers trains. Layers are counted in the order of
    their numbers, so name all of them from the stem on, embeddings included.

    Under DDP the module is wrapped again whenever a layer stops, so ``find_unused_parameters`` is not needed.
    Compared with Composer's LayerFreezing, a layer is a block, not a single module, and the optimizer's groups stay as
    they are, so that checkpoints fit at any time.

    Args:
        fraction: Fraction of the layers below the head that have stopped at ``stop``, in [0, 1]; 0 changes nothing.
        start: When layers begin to stop (int optimizer steps, float fraction of training).
        stop: When the last of them stops, as ``start``.
        parameters: One regular expression, searched in parameters' names, whose first group is the number of a layer,
            as ``r"blocks\.(\d+)"``, or None for a timm or Hugging Face model. Or a sequence of patterns (regular
            expressions or names of classes), one for each layer, from the stem on, without the head; a parameter
            belongs to the first pattern that selects it.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, under a strategy that owns the optimizer (DeepSpeed, FSDP1) or with a
            communication hook that has a state (PowerSGD); when training starts, if layers are not found or share
            weights with others, nothing would train at the end, ``stop`` is before ``start``, for a fraction of an
            unknown length, or a resume with other layers.

    Example:
        >>> callback = LayerFreezing(0.5, start=0.6, parameters=["^net.stem", "^net.layer1", "^net.layer2"])
        >>> trainer = L.Trainer(callbacks=[callback], accelerator="cpu", logger=False)

    References:
        Brock et al., FreezeOut, arXiv 1706.04983; the schedule is that of Composer's LayerFreezing.
    """

    durations = ("start", "stop")
    conflicts = (
        Conflict(("BaseFinetuning", "GradualUnfreeze"), "both freeze parameters and decide when they train"),
        Conflict(
            ("ScheduleFree",),
            "a frozen weight would keep its training value instead of the average that ScheduleFree validates",
        ),
    )

    def __init__(
        self,
        fraction: float = 1.0,
        *,
        start: int | float = 0.5,
        stop: int | float = 1.0,
        parameters: str | Sequence[str] | None = None,
    ) -> None:
        check_range("fraction", fraction, 0.0, 1.0)
        for name, duration in (("start", start), ("stop", stop)):
            check_duration(name, duration)
        if type(start) is type(stop) and stop < start:
            raise ValueError(f"stop must not be before start, got start={start} and stop={stop}: exchange them.")
        check_patterns("parameters", parameters, optional=True)
        super().__init__()
        self.fraction, self.start, self.stop, self.parameters = fraction, start, stop, parameters

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = {name: self._in_steps(trainer, name, getattr(self, name)) for name in self.durations}
        if self._steps["stop"] < self._steps["start"]:
            raise MisconfigurationException(
                f"LayerFreezing(start={self.start}, stop={self.stop}) must not stop before it starts, got optimizer"
                f" steps {self._steps['start']:g} and {self._steps['stop']:g}: give both in one unit."
            )
        super().on_train_start(trainer, pl_module)

    @override
    def _in_steps(self, trainer: L.Trainer, name: str, duration: Any) -> float:
        """A duration in optimizer steps; a ``stop`` of 1.0 is the last one, where layers stop at even intervals."""
        return steps_of(trainer, duration, "LayerFreezing", name)

    @override
    def _order(self, model: nn.Module) -> list[list[str]]:
        return freezing_order(model, self.parameters)[::-1]

    @override
    def _first(self, stages: Stages) -> int:
        return len(stages.order)

    @override
    def _least(self, stages: Stages) -> int:
        return len(stages.order) - math.floor(round(len(stages.order) * self.fraction, 9))

    @override
    def _due(self, trainer: L.Trainer, stages: Stages) -> int:
        layers = len(stages.order)
        stopped = frozen_layers(plan_step(trainer), layers, fraction=self.fraction, **self._steps)
        return min(layers - stopped, self._joined_before)

    @override
    def _changed(self, trainer: L.Trainer, stages: Stages) -> None:
        named = stages.named()
        for parameter in map(named.__getitem__, stages.frozen()):
            parameter.grad = None
            for optimizer in trainer.optimizers:
                optimizer.state.pop(parameter, None)
