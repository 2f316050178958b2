"""A learning-rate schedule as a callback, for YAML and for modules that bring none."""

from __future__ import annotations

import inspect
from typing import Any, final

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from typing_extensions import override

from lightning_tricks.core.active import Trick
from lightning_tricks.core.checks import check_choice, check_count
from lightning_tricks.core.trainer import is_fitting
from lightning_tricks.schedules import (
    CurveLR,
    constant,
    cosine,
    cosine_restarts,
    flat_cos,
    inverse_sqrt,
    linear,
    one_cycle,
    polynomial,
    step_decay,
    wsd,
)
from lightning_tricks.schedules.build import check_settings

_CURVES = {
    factory.__name__: factory
    for factory in (
        *(constant, cosine, cosine_restarts, flat_cos, inverse_sqrt),
        *(linear, one_cycle, polynomial, step_decay, wsd),
    )
}


@final
class LRSchedule(Trick):
    """Learning-rate schedule for a module that returns none: ``lr = base * f(t)`` after t optimizer steps.

    ``base`` is as in CurveLR; the same curves, arguments and defaults as the factories of the same name. Lightning
    itself steps, saves and restores the schedule, as if ``configure_optimizers`` had returned it.

    Args:
        curve: The name of a factory: "constant", "cosine", "cosine_restarts", "flat_cos", "inverse_sqrt", "linear",
            "one_cycle", "polynomial", "step_decay" or "wsd".
        warmup: Length of the warm-up (int steps, float fraction of training); by default the curve's own.
        total_steps: Number of optimizer steps; counted from the Trainer by default.
        floor: Factor at the end and after, in [0, 1]; by default the curve's own.
        **options: Other arguments of the curve, for example ``flat=0.5`` for "flat_cos"; in YAML they go under
            ``dict_kwargs``.

    Raises:
        ValueError: For an unknown curve or a value out of range.
        TypeError: For an option that the curve does not have.
        MisconfigurationException: When training starts, with a second LRSchedule, if the module returns a schedule of
            its own or uses manual optimization, or under DeepSpeed.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[LRSchedule("cosine", warmup=0.05)], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        curve: str = "flat_cos",
        *,
        warmup: int | float | None = None,  # a YAML reader takes a plain float for 5.0 where 5 was written
        total_steps: int | None = None,
        floor: float | None = None,
        **options: Any,
    ) -> None:
        check_choice("curve", curve, _CURVES)
        given = {"warmup": warmup, "floor": floor, **options}
        allowed = set(inspect.signature(_CURVES[curve]).parameters) - {"optimizer", "module", "total_steps"}
        if unknown := sorted(given.keys() - allowed):
            raise TypeError(f"curve {curve!r} has no option {', '.join(unknown)}; it has {', '.join(sorted(allowed))}.")
        self.curve = curve
        self.total_steps = total_steps
        self.settings = {name: value for name, value in given.items() if value is not None}
        check_settings(self.settings)
        if total_steps is not None:
            check_count("total_steps", total_steps)
        self.brought: LRSchedulerConfig | None = None  # until training starts

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "LRSchedule comes too late for DeepSpeed, which takes the optimizer over before training, got"
                f" {type(trainer.strategy).__name__}. Return lightning_tricks.{self.curve}(optimizer, self) from"
                " configure_optimizers."
            )
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "LRSchedule needs automatic optimization: Lightning steps no schedule when"
                f" {type(pl_module).__name__}.automatic_optimization is False. Return a schedule from"
                f" configure_optimizers and step it there, for example lightning_tricks.{self.curve}(optimizer,"
                " total_steps=...)."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # after configure_optimizers and before the checkpoint's schedules are restored
        (optimizer,) = trainer.optimizers
        schedule: dict[str, Any] = _CURVES[self.curve](
            optimizer, pl_module, total_steps=self.total_steps, **self.settings
        )["lr_scheduler"]
        self.brought = LRSchedulerConfig(**schedule)
        trainer.strategy.lr_scheduler_configs.append(self.brought)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.brought = None
        # resumed from a checkpoint without a schedule: nothing was restored, the steps were taken all the same
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        if trainer.ckpt_path and isinstance(scheduler, CurveLR) and scheduler.last_epoch == 0:
            scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": trainer.global_step})
