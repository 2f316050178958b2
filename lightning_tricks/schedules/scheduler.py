"""The one learning-rate scheduler: a curve of the step times each group's base learning rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override


@final
class CurveLR(LRScheduler):
    """Set each group's learning rate to a closed-form curve: ``lr = initial_lr * f(t)`` after t steps.

    Its state is the step and plain data that names the curve, so it loads with ``weights_only=True``. Loaded into a
    schedule with other settings (a longer run, say) it warns and follows the new settings from that step on.

    Args:
        optimizer: The optimizer to schedule.
        curve: A function of ``lightning_tricks.schedules.curves`` bound to its settings by ``functools.partial``.
        last_epoch: Steps taken so far, less one; -1 starts at the first step.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from lightning_tricks.schedules.curves import linear
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> scheduler = CurveLR(optimizer, partial(linear, total_steps=2))
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()
        [0.25]
    """

    def __init__(self, optimizer: Optimizer, curve: partial[float], last_epoch: int = -1) -> None:
        if not isinstance(curve, partial):
            raise TypeError(f"curve must be a curve bound to its settings by functools.partial, got {curve!r}.")
        self.curve: Callable[[int], float] = curve
        self.settings: dict[str, Any] = {"curve": curve.func.__name__, **curve.keywords}
        super().__init__(optimizer, last_epoch)

    @override
    def get_lr(self) -> list[float | Tensor]:  # groups that joined the optimizer later take part from then on
        factor = self.curve(self.last_epoch)
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:
                group["initial_lr"] = deepcopy(group["lr"])  # a Tensor is overwritten in place
        return [group["initial_lr"] * factor for group in self.optimizer.param_groups]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "settings": dict(self.settings)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "settings" not in state_dict:
            raise ValueError(
                "The checkpoint holds the state of another kind of scheduler than CurveLR, with"
                f" {', '.join(map(repr, state_dict))}: resume with that one, or start from the checkpoint's weights."
            )
        if state_dict["settings"] != self.settings:
            warnings.warn(
                f"The schedule of the checkpoint, {state_dict['settings']}, is not this run's, {self.settings}:"
                " this run's is followed from here on.",
                stacklevel=2,
            )
        self.last_epoch, self._step_count = state_dict["last_epoch"] - 1, 0
        self.step()  # sets the groups' learning rates; at count 0 torch does not ask for an optimizer step before it
        self._step_count = self.last_epoch + 1
