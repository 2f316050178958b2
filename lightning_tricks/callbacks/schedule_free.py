"""Schedule-free optimizers: validation, checkpoints and the end of training use their averaged weights."""

from __future__ import annotations

from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.batchnorm import recalibrate_averages, require_recalibration
from lightning_tricks.core.averaging.callback import AveragingCallback
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.optimizer_groups import is_schedule_free

__all__ = ["ScheduleFree"]


@final
class ScheduleFree(AveragingCallback):
    """Validates, saves and ends with the averaged weights of a schedule-free optimizer.

    ``z -= lr * gradient(y)``, ``x += c * (z - x)`` with ``c = 1 / steps``, ``y = x + (1 - beta) * (z - x)``. The module
    holds y while it trains, and ``x = y + (1 - 1/beta) * (z - y)`` is computed after every step, so that validating
    and saving change nothing in training. When training ends, BatchNorm statistics are computed for x, as by ``SWA``.
    Checkpoints hold x in their ``state_dict``, and load anywhere; a resumed fit continues exactly.

    Raises:
        MisconfigurationException: If no optimizer of ``configure_optimizers`` is schedule-free; beside a schedule or
            another average, which would each undo what the optimizer does; under DeepSpeed, which holds its states.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[ScheduleFree()], accelerator="cpu", logger=False)
        >>> # in the module: return lt.optimizer("schedulefree_adamw", self, lr=2.5e-3)

    References:
        Defazio et al., "The Road Less Scheduled", NeurIPS 2024, https://arxiv.org/abs/2405.15682
    """

    conflicts = (
        Conflict(
            ("Averaging", "WeightAveraging", "StochasticWeightAveraging"),
            "a schedule-free optimizer already averages the weights, and a second average would average the wrong ones",
            "Remove the other average",
            lambda trick, other: getattr(other, "module", None) is None,  # a teacher that is another module
        ),
        Conflict(
            ("schedule from configure_optimizers", "LRSchedule"),
            "a schedule-free optimizer takes the place of a schedule, and averages wrongly under another one",
            "Return the optimizer alone; it has a warm-up of its own (warmup_steps=)",
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self.start, self.buffers, self.device = 0, "copy", None
        self.validate, self.at_end = "averaged", "averaged"

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if not any(map(is_schedule_free, trainer.optimizers)) or engine_of(trainer).is_deepspeed:
            names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise MisconfigurationException(
                "ScheduleFree() needs an optimizer with train() and eval(), outside of DeepSpeed:"
                f" {type(pl_module).__name__}.configure_optimizers returns {names}. Return"
                ' lightning_tricks.optimizer("schedulefree_adamw", self, lr=2.5e-3).'
            )
        if not all(
            _beta(group) for made in filter(is_schedule_free, trainer.optimizers) for group in made.param_groups
        ):
            raise MisconfigurationException(
                f"ScheduleFree() needs a beta above 0, without which y tells nothing of x: {type(pl_module).__name__}"
                " has betas=(0, ...) or momentum=0. Leave that out."
            )
        require_recalibration(self, trainer, pl_module, "use a norm without statistics, as GroupNorm")

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in filter(is_schedule_free, trainer.optimizers):
            optimizer.train()  # type: ignore[attr-defined]
        super().on_train_start(trainer, pl_module)  # which remembers the weights

    @override
    def _begin(self, trainer: L.Trainer, averages: Averages) -> None:
        self._update(trainer, averages)

    @override
    @torch.no_grad()
    def _update(self, trainer: L.Trainer, averages: Averages) -> None:
        parts, parameters = averages.parts(), dict(averages.module.named_parameters())
        ends = {weight: end for optimizer in trainer.optimizers for weight, end in _ends(optimizer).items()}
        for (name, average), y in zip(averages.tensors.items(), parts, strict=True):
            weight = parameters.get(name)
            if weight is None or weight not in ends:
                average.copy_(y)
                continue
            z, fraction = ends[weight]
            local = averages.weights.local(z)
            assert local is not None, "this rank has a part of z where it has one of y"
            average.copy_(y.lerp(local.to(y.dtype), fraction))
        averages.updates += 1

    @override
    def _finish(self, trainer: L.Trainer, averages: Averages) -> None:
        recalibrate_averages(trainer, averages)


def _ends(optimizer: Optimizer) -> dict[Tensor, tuple[Tensor, float]]:
    """The z of every weight and the fraction of the way from y to it, at which x is."""
    found = {}
    for group in optimizer.param_groups if is_schedule_free(optimizer) else ():
        for weight in group["params"]:
            if "z" in optimizer.state[weight]:
                found[weight] = optimizer.state[weight]["z"], 1 - 1 / _beta(group)
    return found


def _beta(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group["momentum"])
