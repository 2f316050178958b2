"""A learning-rate schedule as a callback, for YAML and for modules that bring none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, final

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, check_choice
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.optimizer_groups import recorded_groups, restore_groups, weights_of
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.trick import Trick
from lightning_tricks.schedules import PlateauLR, reduce_on_plateau, swa_tail
from lightning_tricks.schedules.arguments import check_settings, count_steps
from lightning_tricks.schedules.factories import CURVES
from lightning_tricks.schedules.planned import Schedule
from lightning_tricks.schedules.scaling import is_scaled
from lightning_tricks.schedules.scheduler import CONFLICTS

__all__ = ["LRSchedule"]


def _swa_tail(
    optimizer: Optimizer,
    module: L.LightningModule,
    *,
    of: str = "constant",
    total_steps: int | None = None,
    start: int | float = 0.75,
    swa_lr: float,
    anneal: int | float = 0,
    **settings: Any,
) -> Schedule:
    """``swa_tail`` after the curve of a name, with the settings of that curve."""
    in_steps = isinstance(start, int) and isinstance(anneal, int)
    counts = total_steps is None and of in ("constant", "inverse_sqrt") and not in_steps
    if counts:
        total_steps = count_steps(module, "swa_tail")  # The curve before the tail does not need T.
    before: Any = CURVES[of](optimizer, module, total_steps=total_steps, **settings)
    if counts:
        before["lr_scheduler"]["scheduler"].follows = True
    return swa_tail(before, start=start, swa_lr=swa_lr, anneal=anneal)


_FACTORIES: dict[str, Callable[..., Schedule]] = {
    **CURVES,
    "reduce_on_plateau": reduce_on_plateau,
    "swa_tail": _swa_tail,
}


def _options(name: str) -> set[str]:
    """The names of the arguments that say what the schedule of a factory is."""
    parameters = inspect.signature(_FACTORIES[name]).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


@final
class LRSchedule(Trick):
    """Learning-rate schedule for a module that returns none: ``lr = base * f(t)`` after t optimizer steps.

    ``base`` is as in CurveLR; the same curves, arguments and defaults as the factories of the same name. Lightning
    itself steps, saves and restores the schedule, as if ``configure_optimizers`` had returned it.

    Args:
        curve: Name of a factory: "constant", "cosine", "cosine_restarts", "flat_cos", "inverse_sqrt", "linear",
            "one_cycle", "polynomial", "reduce_on_plateau", "step_decay", "swa_tail" or "wsd".
        warmup: Length of the warm-up (int steps, float fraction of training); by default the curve's own.
        total_steps: Number of optimizer steps, counted from the Trainer by default; none for "reduce_on_plateau".
        floor: Lowest factor of the base learning rate, in [0, 1]; by default the curve's own.
        replace: Whether to take the place of a schedule that the module returns, with the learning rates (and momenta)
            that its optimizer was made with, before that schedule changed them.
        **options: Other arguments of the factory, for example ``flat=0.5`` for "flat_cos" or ``monitor="val_loss"`` for
            "reduce_on_plateau"; in YAML they go under ``dict_kwargs``. "swa_tail" needs ``swa_lr``, and takes with
            ``of`` the name of the curve before the tail ("constant" by default) and the arguments of that curve.

    Raises:
        ValueError: For an unknown curve or a value out of range.
        TypeError: For an option that the curve does not have, or one that it lacks.
        MisconfigurationException: When training starts, with a second LRSchedule, if the module returns a schedule of
            its own without ``replace=True`` or uses manual optimization, under DeepSpeed, or where a schedule cannot be
            replaced because its optimizer was made outside of ``configure_optimizers``. While training, before the
            first optimizer step with a learning rate that something else has set: the module or a callback, by hand
            or by a schedule that it steps itself.

    Example:
        >>> import lightning as L
        >>> schedule = LRSchedule("swa_tail", of="cosine", warmup=0.05, start=0.75, swa_lr=0.01)
        >>> trainer = L.Trainer(callbacks=[schedule], accelerator="cpu", logger=False)
    """

    conflicts = (
        *CONFLICTS,
        Conflict(("LRSchedule",), "both would set the learning rate"),
        Conflict(
            ("BackboneFinetuning",),
            "it sets the learning rate of the backbone in every epoch, and the schedule in every step",
            "Use GradualUnfreeze(lr_factor=...), which keeps to the schedule",
        ),
        Conflict(
            ("schedule from configure_optimizers",),
            "both set the learning rate",
            "Remove one of them, or pass LRSchedule(replace=True) to take the place of the module's",
            lambda trick, schedule: not trick.replace,
        ),
    )

    def __init__(
        self,
        curve: str = "flat_cos",
        *,
        # For a plain float a YAML reader takes 5.0 where 5 was written. Without Literal[0], Python 3.10 would take the
        # first equal type of the process for this one, such as the Optional[Union[float, int]] of another library.
        warmup: int | float | Literal[0] | None = None,
        total_steps: int | None = None,
        floor: float | None = None,
        replace: bool = False,
        **options: Any,
    ) -> None:
        check_bool("replace", replace)
        check_choice("curve", curve, _FACTORIES)
        named = {"warmup": warmup, "total_steps": total_steps, "floor": floor}
        given = {**options, **{name: value for name, value in named.items() if value is not None}}
        allowed = _options(curve)
        if curve == "swa_tail":
            of = "constant" if options.get("of") is None else options["of"]
            check_choice("of", of, CURVES)
            allowed |= _options(of)
        if unknown := sorted(given.keys() - allowed):
            known = ", ".join(sorted(allowed - {"total_steps"}))
            raise TypeError(f"curve {curve!r} has no option {', '.join(unknown)}; it has {known}.")
        given = {name: value for name, value in given.items() if value is not None}
        if curve == "swa_tail" and "swa_lr" not in given:
            raise TypeError(
                "curve 'swa_tail' must have swa_lr, the learning rate of its tail, got none: pass swa_lr=..."
            )
        check_settings({name: value for name, value in given.items() if name != "of"})
        super().__init__()
        self.curve = curve
        self.total_steps = given.pop("total_steps", None)
        self.settings = given
        self.replace = replace
        self._held: set[int] = set()  # the parameters of the optimizers that configure_optimizers has made
        self._scheduler: Any = None  # in a fit, the one that this callback has made
        self._taken = 0  # the steps of that scheduler that Lightning has taken

    @override
    def _arguments(self) -> dict[str, Any]:
        return {"curve": self.curve, "total_steps": self.total_steps, "replace": self.replace, **self.settings}

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        if engine_of(trainer).is_deepspeed:
            raise MisconfigurationException(
                "LRSchedule comes too late for DeepSpeed, which takes the optimizer over before training, got"
                f" {type(trainer.strategy).__name__}. Return {self._as_call('self')} from configure_optimizers."
            )
        if not pl_module.automatic_optimization:
            length = "self" if self.curve == "reduce_on_plateau" else "total_steps=..."
            raise MisconfigurationException(
                "LRSchedule needs automatic optimization: Lightning steps no schedule when"
                f" {type(pl_module).__name__}.automatic_optimization is False. Return a schedule from"
                f" configure_optimizers and step it there, for example {self._as_call(length)}."
            )

        if self.replace:
            self._wrap(pl_module, "configure_optimizers", self._configure)
        # A module that ships another kind of scheduler may step it in its own way.
        self._wrap(pl_module, "lr_scheduler_step", partial(self._step, trainer))

    def _configure(self, original: Callable[[], Any]) -> Any:
        """Call the module's ``configure_optimizers`` and undo what its schedule has done to the optimizer."""
        with recorded_groups() as made:
            configured = original()
        restore_groups(made)
        self._held = {id(parameter) for group, _ in made for parameter in group["params"]}
        return configured

    def _drop_schedules(self, trainer: L.Trainer, optimizer: Optimizer) -> list[Any]:
        """Leave out the schedules that the module has returned, and return them."""
        configs = trainer.strategy.lr_scheduler_configs
        parameters = set(map(id, weights_of(optimizer)))
        if configs and not parameters <= self._held:  # others may have split the groups since
            raise MisconfigurationException(
                f"LRSchedule(replace=True) needs the learning rate that {type(optimizer).__name__} was made with, and"
                f" {type(configs[0].scheduler).__name__} may have changed it, got an optimizer made outside of"
                f" {type(trainer.lightning_module).__name__}.configure_optimizers: make it there."
            )
        dropped = [config.scheduler for config in configs]
        configs.clear()
        self._held = set()
        return dropped

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # after configure_optimizers and before the checkpoint's schedules are restored
        (optimizer,) = trainer.optimizers
        if not optimizer.param_groups:  # Lightning's stand-in
            raise MisconfigurationException(
                f"LRSchedule({self.curve!r}) needs the optimizer of {type(pl_module).__name__}.configure_optimizers,"
                " which has returned none: return the one that trains."
            )
        others = self._drop_schedules(trainer, optimizer) if self.replace else []
        kept = [value for value in vars(pl_module).values() if isinstance(value, LRScheduler)]
        for other in {id(s): s for s in (*others, *kept) if s.optimizer is optimizer}.values():
            self._wrap(other, "step", partial(self._refuse_step, pl_module, other))
        total = {} if self.total_steps is None else {"total_steps": self.total_steps}
        try:
            schedule = _FACTORIES[self.curve](optimizer, pl_module, **total, **self.settings)
        except UnknownTotalSteps as error:
            raise UnknownTotalSteps(f"LRSchedule({self.curve!r}): {error.reason}", error.otherwise) from error
        config: Any = schedule["lr_scheduler"]
        self._scheduler = config["scheduler"]
        self._undo.callback(setattr, self, "_scheduler", None)
        needs_metric = isinstance(self._scheduler, PlateauLR)
        trainer.strategy.lr_scheduler_configs.append(LRSchedulerConfig(**config, reduce_on_plateau=needs_metric))

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # resumed from a checkpoint without a schedule: nothing was restored, the steps were taken all the same
        scheduler = self._scheduler
        count = "steps" if isinstance(scheduler, PlateauLR) else "last_epoch"
        if trainer.ckpt_path and getattr(scheduler, count) == 0:
            rates = [group["lr"] for group in scheduler.optimizer.param_groups]  # those of the checkpoint
            scheduler.load_state_dict({**scheduler.state_dict(), count: trainer.global_step, "_last_lr": rates})
        self._taken = scheduler.last_epoch

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if optimizer is not self._scheduler.optimizer:
            raise MisconfigurationException(
                f"{type(pl_module).__name__} has made its optimizers anew, and LRSchedule({self.curve!r}) schedules the"
                f" earlier one: return {self._as_call('self')} from configure_optimizers in place of the callback."
            )
        if not is_scaled(optimizer):
            self._require_own_rates(trainer)

    def _step(self, trainer: L.Trainer, original: Callable[..., None], scheduler: Any, metric: Any) -> None:
        """Step a scheduler as Lightning does, not as the module may do with its own."""
        own = scheduler is self._scheduler  # and not that of a LearningRateFinder
        if own:
            self._require_own_rates(trainer)  # a rate that was written after on_before_optimizer_step would be lost
        L.LightningModule.lr_scheduler_step(trainer.lightning_module, scheduler, metric)
        if own:
            self._taken = scheduler.last_epoch

    def _require_own_rates(self, trainer: L.Trainer) -> None:
        """Raise if something else has set a learning rate since the schedule did.

        Raises:
            MisconfigurationException: If a learning rate is not the schedule's.
        """
        if all(config.scheduler is not self._scheduler for config in trainer.lr_scheduler_configs):
            return  # Lightning's StochasticWeightAveraging has taken its place
        if self._scheduler.last_epoch > self._taken:
            raise MisconfigurationException(
                f"{type(trainer.lightning_module).__name__} steps the schedule of LRSchedule({self.curve!r}) itself,"
                " which Lightning steps: leave the lines out that step self.lr_schedulers()."
            )
        self._taken = self._scheduler.last_epoch  # RewindOnSpike may have put it back
        own = self._scheduler.get_last_lr()  # none for groups that have joined since
        for number, (group, lr) in enumerate(zip(self._scheduler.optimizer.param_groups, own, strict=False)):
            if not _is_same(group["lr"], lr):
                raise MisconfigurationException(
                    f"LRSchedule({self.curve!r}) has set the learning rate of parameter group {number} to"
                    f" {float(lr):g}, and {type(trainer.lightning_module).__name__} or a callback has set it to"
                    f" {float(group['lr']):g} since: only one of them can. Leave LRSchedule out, or the lines that"
                    " write param_groups[...]['lr'] or step a schedule by hand."
                )

    def _refuse_step(self, pl_module: L.LightningModule, scheduler: Any, *_: Any, **__: Any) -> None:
        """Raise where the module steps a schedule of its own."""
        raise MisconfigurationException(
            f"{type(pl_module).__name__} steps {type(scheduler).__name__} itself beside LRSchedule({self.curve!r}):"
            " only one of them can set the learning rate. Leave LRSchedule out, or the lines that step the schedule by"
            " hand."
        )

    def _as_call(self, length: str) -> str:
        """The call that makes the same schedule in ``configure_optimizers``, for error messages."""
        if self.curve != "swa_tail":
            return f"lightning_tricks.{self.curve}(optimizer, {length})"
        before = f"lightning_tricks.{self.settings.get('of', 'constant')}(optimizer, {length})"
        return f"lightning_tricks.swa_tail({before}, swa_lr={self.settings['swa_lr']})"


def _is_same(now: float | Tensor, lr: float | Tensor) -> bool:
    """Whether a group still has a learning rate; of a Tensor on a GPU, which is slow to read, only the kind is."""
    if isinstance(now, Tensor) and isinstance(lr, Tensor) and now.device.type != "cpu":
        return True
    return float(now) == float(lr)
