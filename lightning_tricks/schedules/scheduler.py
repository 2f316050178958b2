"""The one learning-rate scheduler: a curve of the step times each group's base learning rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, final

import lightning as L
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_tricks.core.call_stack import locals_of
from lightning_tricks.core.checks import check_type
from lightning_tricks.core.conflicts import Conflict, Participant
from lightning_tricks.core.lightning.fit import Place
from lightning_tricks.core.report import Row, curve_row, in_whole_steps

__all__ = ["CurveLR"]

Curve = Callable[[float], float]  # the factor of the base learning rate at a step

CONFLICTS = (
    Conflict(
        ("StochasticWeightAveraging",),
        "it takes the schedule over when it starts, so that the curve never comes to its end",
        "Use SWA of lightning_tricks, with swa_tail for the learning rate of its epochs",
        warns=True,
    ),
)


@final
class CurveLR(Participant, LRScheduler):
    """Set each group's learning rate to a closed-form curve: ``lr = base * f(t)`` after t steps.

    ``base`` is the group's ``max_lr`` if it has one, otherwise its ``initial_lr``, times its ``lr_scale`` (of timm's
    layer decay) if it has one; a group that joins the optimizer later takes part from its first step. The state is the
    step and plain data that names the curve, so it loads with ``weights_only=True``. Loaded into a schedule with other
    settings (a longer run, say) it warns and follows the new settings from that step on. A schedule whose T was counted
    from a fit follows the plan of the fit: see ``optimizer_steps``.

    Args:
        optimizer: The optimizer to schedule.
        curve: f, a function of the step that can be pickled: one of ``lightning_tricks.schedules.curves`` or your own,
            bound to its settings by ``functools.partial``.
        last_epoch: Number of steps taken so far, less one; -1 starts at the first step.
        momentum: Function of the step, like ``curve``, for the groups' momentum or first beta. None leaves it alone.

    Raises:
        TypeError: For a curve that cannot be pickled, such as a lambda.
        ValueError: For a momentum curve and an optimizer without momentum.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from lightning_tricks.schedules.curves import linear
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> scheduler = CurveLR(optimizer, partial(linear, total_steps=2))
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()
        [0.25]
    """

    conflicts = CONFLICTS

    def __init__(
        self, optimizer: Optimizer, curve: Curve, last_epoch: int = -1, *, momentum: Curve | None = None
    ) -> None:
        _check_curve("curve", curve)
        if momentum is not None:
            _check_curve("momentum", momentum)
        if momentum is not None and not all("betas" in g or g.get("momentum", 0) > 0 for g in optimizer.param_groups):
            raise ValueError(
                f"The momentum can be cycled where there is some, got {type(optimizer).__name__} without: leave"
                " momentum out, or give the optimizer one."
            )
        check_type("last_epoch", last_epoch, int)
        if last_epoch != -1 and not all("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(f"last_epoch must be -1 for groups without an initial_lr, got {last_epoch}.")
        self.curve = curve
        self.momentum = momentum
        self.settings = settings_of(curve, momentum)
        # What a factory knows: the curve and that of the momentum at another place of the fit in its plan, and whether
        # T was counted from the fit, so that they follow the plan.
        self.rebind: Callable[[Place], tuple[Curve, Curve | None]] | None = None
        self.follows = False
        self.arguments: Mapping[str, Any] | None = None  # those of the factory, as they were given
        self._saved: Mapping[str, Any] = {}  # the settings of the checkpoint, until they are compared
        self.replaced = False  # whether another scheduler follows its curve in its place
        # The interval and frequency of its steps in a Trainer, whatever dictionary it is returned in; None for those
        # of the dictionary.
        self.occasion: tuple[str, int] | None = None
        prepare_hooks(optimizer)
        super().__init__(optimizer, last_epoch)
        self._follow_the_optimizer()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._follow_the_optimizer()  # a copied optimizer comes without its hooks

    def _follow_the_optimizer(self) -> None:
        if has_hooks(self.optimizer):  # else groups that join wait for the next step of the schedule
            self.optimizer.register_step_pre_hook(self._let_in)

    def _let_in(self, *_: Any) -> None:
        """Give groups that have joined since the last step their learning rate in this one."""
        if self.occasion is not None and not self.follows:
            self._keep_occasion(self.occasion)
        for group in () if self.replaced else self.optimizer.param_groups:
            if "initial_lr" not in group:
                set_lr(group, base_lr(group) * self.curve(self.last_epoch))
                if self.momentum is not None:
                    self._set_momentum(self.momentum(self.last_epoch))

    def _keep_occasion(self, occasion: tuple[str, int]) -> None:
        """Have the Trainer that steps the optimizer step this scheduler when it is due.

        A scheduler that was made before there was a Trainer meets it here first.

        Raises:
            MisconfigurationException: If the curve has as many steps as training has epochs of several steps.
        """
        if (caller := locals_of(Strategy.optimizer_step)) is None:
            return  # no Trainer steps it
        strategy: Strategy = caller["self"]
        for config in strategy.lr_scheduler_configs:
            if config.scheduler is self:
                config.interval, config.frequency = occasion
                if strategy.lightning_module is not None:
                    self._refuse_epochs(strategy.lightning_module.trainer)

    def _refuse_epochs(self, trainer: L.Trainer) -> None:
        total = self.settings.get("total_steps") or 1  # None for an endless curve
        if 1 < total == trainer.max_epochs and trainer.accumulate_grad_batches < trainer.num_training_batches:
            raise MisconfigurationException(
                f"total_steps is the number of optimizer steps, got {total}, the number of epochs: leave it out in"
                " configure_optimizers, or pass trainer.estimated_stepping_batches."
            )

    @override
    def get_lr(self) -> list[float | Tensor]:
        # From the base rate, and not from the present one as torch's chainable forms: rounding would add up.
        factor = self.curve(self.last_epoch)
        if self.momentum is not None:
            self._set_momentum(self.momentum(self.last_epoch))
        return [base_lr(group) * factor for group in self.optimizer.param_groups]

    def _set_momentum(self, momentum: float) -> None:
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "settings": dict(self.settings)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state(self, state_dict, "settings")
        if not self.follows:
            warn_of_other_settings(state_dict["settings"], self.settings)
        self._saved = state_dict["settings"]
        self._go_to(state_dict["last_epoch"])

    def _go_to(self, step: int) -> None:
        self.last_epoch, self._step_count = step - 1, 0
        self.step()  # sets the groups' learning rates; at count 0 torch does not ask for an optimizer step before it
        self._step_count = self.last_epoch + 1

    @override
    def row(self, trainer: L.Trainer) -> Row:
        return curve_row(in_whole_steps(self.settings))

    @override
    def given(self) -> Row:
        return curve_row(self.settings if self.arguments is None else self.arguments)

    def lr_at(self, step: int) -> float:
        """The learning rate of the first parameter group after so many steps."""
        return float(base_lr(self.optimizer.param_groups[0])) * self.curve(step)

    def follow(self, place: Place, before: Place, taken: int) -> None:
        """Go on at the step of the plan, when a fit begins.

        Args:
            place: The place of the fit in its plan.
            before: The place in the plan that the schedule's state is of.
            taken: The number of optimizer steps taken so far.
        """
        if not self.follows or self.rebind is None:
            return
        own = self.settings
        if place.plan is not None:
            self.curve, self.momentum = self.rebind(place)
            self.settings = own = settings_of(self.curve, self.momentum)
            # A schedule at its first step is new, and nothing was restored into it.
            step = self.last_epoch + place.offset - before.offset if self.last_epoch else taken + place.offset
            if step != self.last_epoch or self.get_last_lr() != self.get_lr():
                self._go_to(step)
        if self._saved:
            with suppress(ValueError):  # of lengths that do not fit into the earlier plan
                own = own if before.plan is None else settings_of(*self.rebind(before))
            warn_of_other_settings(self._saved, own)  # not of the plan, which is told once for all schedules
            self._saved = {}


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer calls step hooks; wrappers that do not call ``Optimizer.__init__`` have none."""
    return "_optimizer_step_post_hooks" in vars(optimizer)  # LightningOptimizer shows those of the optimizer inside


def prepare_hooks(optimizer: Optimizer) -> None:
    """Have an optimizer call its step hooks from the first step on.

    torch would begin to call those of timm's Lookahead, which does not call ``Optimizer.__init__``, within that step.
    A schedule does this before torch puts a counter around the step.
    """
    if isinstance(optimizer, Optimizer) and has_hooks(optimizer):
        optimizer._patch_step_function()


def base_lr(group: dict[str, Any]) -> float | Tensor:
    """What a schedule's factors multiply: ``max_lr`` or else ``initial_lr``, times ``lr_scale``."""
    if "initial_lr" not in group:
        group["initial_lr"] = deepcopy(group["lr"])  # a Tensor is overwritten in place
    base: float | Tensor = group.get("max_lr", group["initial_lr"]) * group.get("lr_scale", 1)
    return base


def set_lr(group: dict[str, Any], lr: float | Tensor) -> None:
    """Give a parameter group a learning rate; a Tensor, which a compiled step reads, stays the same object."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def check_state(scheduler: object, state: Mapping[str, Any], name: str) -> None:
    """Raise unless the state of a scheduler has what this kind of scheduler saves under a name."""
    if name not in state:
        raise ValueError(
            f"The checkpoint holds the state of another kind of scheduler than {type(scheduler).__name__}, with"
            f" {', '.join(map(repr, state))}: resume with that one, or start from the checkpoint's weights."
        )


def warn_of_other_settings(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Warn if the schedule of a checkpoint has other settings than that of this run."""
    if _listed(saved) != _listed(own):
        text = f"The schedule of the checkpoint, {saved}, is not this run's, {own}: this run's is followed from now on."
        warnings.warn(text, stacklevel=3)


def _listed(value: Any) -> Any:
    """Settings with lists in place of tuples, as a checkpoint of XLA has them."""
    if isinstance(value, Mapping):
        return {name: _listed(item) for name, item in value.items()}
    return [*map(_listed, value)] if isinstance(value, list | tuple) else value


def _check_curve(name: str, curve: object) -> None:
    if not callable(curve) or "<" in getattr(curve, "__qualname__", ""):  # <lambda>, or <locals> of a function
        raise TypeError(
            f"{name} must be a function of the step that can be pickled, one of lightning_tricks.schedules.curves or of"
            f" the top level of your own module, bound to its settings by functools.partial, got {curve!r}."
        )


def settings_of(curve: Curve, momentum: Curve | None = None) -> dict[str, Any]:
    """A curve, and that of the momentum, as plain data."""
    return _plain(curve) | ({} if momentum is None else {"momentum": _plain(momentum)})


def _plain(curve: Curve) -> dict[str, Any]:
    """A curve as plain data: its name and its settings, ``of`` the curve that it goes on from."""
    if not isinstance(curve, partial):
        name = getattr(curve, "__name__", None)
        return {"curve": name} if name else {"curve": type(curve).__name__, **vars(curve)}
    settings = {"of" if name == "curve" else name: value for name, value in curve.keywords.items()}
    return _plain(curve.func) | {name: _plain(value) if callable(value) else value for name, value in settings.items()}
