"""Gradual unfreezing of a pretrained model, from the head to the stem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise, takewhile
from typing import Any, Literal, final

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_duration, check_range, examples
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.fit import plan_step
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.selection import check_patterns
from lightning_tricks.core.weights.stages import StagedCallback, Stages, groups_by_pattern
from lightning_tricks.core.weights.tensors import trainable
from lightning_tricks.schedules.param_groups import known_layers, numbered_layers
from lightning_tricks.schedules.split_groups import split_groups

__all__ = ["GradualUnfreeze"]


def unfreeze_order(model: nn.Module, parameters: str | Sequence[str] | None, count: int) -> list[list[str]]:
    r"""The names of the trainable parameters, in ``count`` groups from the head to the stem, without the head.

    Args:
        model: The model.
        parameters: The groups, as for GradualUnfreeze.
        count: The number of groups; layers are divided evenly, with larger groups first.

    Raises:
        ValueError: If a pattern selects no parameter, there are fewer layers than groups, or the layers are unknown.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
        >>> unfreeze_order(model, r"^(\d+)", 2)
        [['1.weight', '2.weight'], ['0.weight']]
        >>> unfreeze_order(model, ["^2", ""], 2)
        [['2.weight'], ['0.weight', '1.weight', '3.weight']]
    """
    if parameters is not None and not isinstance(parameters, str):
        return groups_by_pattern(model, parameters)
    own = "parameters"  # the user's argument, for the error messages
    keys = known_layers(model, own) if parameters is None else numbered_layers(model, parameters, own)
    names = list(trainable(model))
    layers = sorted({keys[name] for name in names}, reverse=True)[1:]
    if len(layers) < count:
        raise ValueError(
            f"at: {count} times need as many layers below the head, found {len(layers)}: give fewer times."
        )
    size, more = divmod(len(layers), count)
    taken = iter(layers)
    parts = [set(islice(taken, size + (n < more))) for n in range(count)]
    return [[name for name in names if keys[name] in part] for part in parts]


@final
class GradualUnfreeze(StagedCallback):
    r"""Gradual unfreezing: the head trains from the start, and the parts below it join one by one, down to the stem.

    The k-th group, k = 1, 2, ..., gets gradients from ``at[k-1]`` on. Its learning rate is your optimizer's times
    ``lr_factor**k``, and follows the schedule from the first step. Momentum and weight decay do not change frozen
    parameters, their BatchNorm layers are in eval mode, and they need no memory for gradients. Give the optimizer all
    parameters, in any groups (``self.parameters()``): they are trainable while ``configure_optimizers`` runs. Groups
    are split there and never added later, so a checkpoint fits at any time. Parameters that you froze yourself stay
    frozen. After training all others are trainable again.

    Under DDP the module is wrapped again whenever a group joins, so ``find_unused_parameters`` is not needed. Compared
    with Lightning's BackboneFinetuning it has several groups, works with any schedule, counts steps as well as epochs,
    and has the same optimizer groups in every checkpoint.

    Args:
        at: When the groups join, in order: ints count ``unit``, floats are fractions of training in [0, 1].
        parameters: A sequence of patterns, as many as ``at``: regular expressions searched in parameters' names, or
            names of classes. A parameter belongs to the first pattern that selects it, and trains from the start if
            none does. Or one regular expression whose first group is the number of a layer, as ``r"blocks\.(\d+)"``,
            or None for a timm or Hugging Face model; the layers below the head are then divided into groups.
        unit: The unit of ints in ``at``: "step" (optimizer steps) or "epoch".
        lr_factor: Factor of the learning rate from one group to the next, above 0 (ULMFiT has 1/2.6).

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or times that are not in order.
        MisconfigurationException: At setup, under a strategy that owns the optimizer (DeepSpeed, FSDP1) or with a
            communication hook that has a state (PowerSGD); when training starts, if the groups are not found, nothing
            would train or an optimizer lacks a frozen parameter, for a scheduler that is neither torch's nor of this
            package (with an ``lr_factor``), for a fraction of an unknown length, or a resume with other groups.

    Example:
        >>> callback = GradualUnfreeze([1, 2], parameters=["^net.layer4", "^net"], unit="epoch", lr_factor=0.3)
        >>> trainer = L.Trainer(callbacks=[callback], accelerator="cpu", logger=False)

    References:
        Howard and Ruder, ULMFiT, arXiv 1801.06146.
    """

    durations = ("at",)
    conflicts = (Conflict(("BaseFinetuning",), "both freeze parameters and decide when they train"),)

    def __init__(
        self,
        at: Sequence[int | float],
        *,
        parameters: str | Sequence[str] | None = None,
        unit: Literal["step", "epoch"] = "step",
        lr_factor: float = 1.0,
    ) -> None:
        _check_times(at)
        if parameters is not None:
            check_patterns("parameters", parameters)
            if not isinstance(parameters, str) and len(parameters) != len(at):
                raise ValueError(
                    f"parameters must be as many patterns as at has times, {len(at)}, got {list(parameters)!r}."
                )
        check_choice("unit", unit, ("step", "epoch"))
        check_range("lr_factor", lr_factor, 0.0)
        if lr_factor == 0:
            raise ValueError(
                "lr_factor must be above 0, got 0: leave a group out that must never train, and freeze it."
            )
        super().__init__()
        self.at = at
        self.parameters = parameters
        self.unit = unit
        self.lr_factor = lr_factor

    @override
    def _order(self, model: nn.Module) -> list[list[str]]:
        return unfreeze_order(model, self.parameters, len(self.at))

    @override
    def _first(self, stages: Stages) -> int:
        return sum(1 for _ in takewhile(lambda time: time == 0, self.at))

    @override
    def _optimizers_made(self, trainer: L.Trainer, stages: Stages) -> None:
        named = stages.named()
        held = {id(weight) for optimizer in trainer.optimizers for weight in weights_of(optimizer)}
        if lost := [name for name in stages.names() if id(named[name]) not in held]:
            raise MisconfigurationException(
                f"GradualUnfreeze: the optimizers must have every parameter that will train, {len(lost)} are in none:"
                f" pass self.parameters(), which includes those that are frozen at first. {examples(lost)}"
            )
        if self.lr_factor != 1:
            self._split(trainer, [[named[name] for name in names] for names in stages.order])

    def _split(self, trainer: L.Trainer, order: list[list[nn.Parameter]]) -> None:
        parts = [(parameters, self.lr_factor**k) for k, parameters in enumerate(order, 1)]
        for optimizer in trainer.optimizers:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            try:
                split_groups(
                    optimizer, [scheduler for scheduler in schedulers if scheduler.optimizer is optimizer], parts
                )
            except TypeError as error:
                raise MisconfigurationException(f"GradualUnfreeze(lr_factor={self.lr_factor}): {error}") from error

    @override
    def _due(self, trainer: L.Trainer, stages: Stages) -> int:
        due = stages.joined
        while due > self._joined_before and not self._is_due(trainer, due - 1):  # after a rewind
            due -= 1
        while due < len(self.at) and self._is_due(trainer, due):
            due += 1
        return due

    def _is_due(self, trainer: L.Trainer, group: int) -> bool:
        now = trainer.current_epoch if self._in_epochs(self.at[group]) else plan_step(trainer)
        return bool(now >= self._steps["at"][group])

    @override
    def _in_steps(self, trainer: L.Trainer, name: str, duration: Any) -> list[float]:
        """The times in their units: epochs, or optimizer steps."""
        in_steps = super()._in_steps
        return [time if self._in_epochs(time) else in_steps(trainer, name, time) for time in duration]

    def _in_epochs(self, time: int | float) -> bool:
        return self.unit == "epoch" and isinstance(time, int)


def _check_times(at: Sequence[int | float]) -> None:
    if isinstance(at, str | bytes) or not isinstance(at, Sequence) or not at:
        raise TypeError(f"at must be a list of times, one for each group, as [1, 2, 0.5], got {at!r}.")
    for place, time in enumerate(at):
        check_duration(f"at[{place}]", time)
    for kind in (int, float):
        times = [time for time in at if isinstance(time, kind)]
        if any(later < earlier for earlier, later in pairwise(times)):
            raise ValueError(f"at must be in ascending order, got {list(at)!r}: sort it.")
